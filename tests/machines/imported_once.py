"""What ranks of tests import, as the server of the program's own ranks does: else each of them would anew."""

import gc

import pytest  # noqa: F401

import autotune  # noqa: F401
from tests.programs import storms  # noqa: F401
from tests.values import search, training  # noqa: F401
from trials.run.worker import import_serve

import_serve()
gc.freeze()
gc.enable()
