"""What a run writes about itself, and who reads it.

workdir.py        the folder of a run; buckets.py is its part in a bucket
journal.py        everything that a run writes
metrics.py        metrics.jsonl; metric_names.py says what each metric means
episodes.py       metrics and records of episodes; outcomes.py says how they ended
scores.py         held-out scores
health.py         alarms
timing.py         seconds per phase, and profiles
sinks.py          TensorBoard and trackers, see tracker.py
report.py         the report; charts.py has its curves, viewer.py serves it during a run
provenance.py     code, packages, devices and command
shared_folder.py  checks that all processes see one folder
"""
