"""What a user may write in a config, and what fits together. `stppo_jax.config` has the schema.

validation.py   checks each field, then the rules that span fields
objective.py    the `Variant` that a config names, resolved and checked
sections/       the rules of optional parts, imported with them
"""
