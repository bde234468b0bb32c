"""Files to tasks, passages and conversations.

tasks.py           files -> Tasks and Passages, and the order of training
mix.py             the same order for several environments in one run
conversations.py   files -> conversations to imitate, as episodes
row_files.py       files -> rows; row_objects.py reads JSON values, row_tables.py tables
scripts.py         writing systems whose words have no spaces
cells.py           cells of tables that hold lists and objects as texts
public_formats.py  rows -> Tasks and Passages, by the layout of the file
layouts.py         the records of published layouts
layout_fit.py      which record fits a file; layout_profile.py describes its columns
layout_values.py   options, the option that an answer names, and answers
"""
