"""Rules of optional parts. The tables in `validation` say which setting imports which file."""
