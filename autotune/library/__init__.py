"""The commands as functions, one in each module: they return values, raise errors, and print nothing.

Every function takes a job: the path of a job file, a mapping with the sections of one, or a `Job`. `database` is the
URL of a database, as `--db` on the command line. `listener` is called with the events of `autotune.events`, from any
thread; `print` shows them. Warnings go to `logging`. Import the functions from `autotune`.
"""
