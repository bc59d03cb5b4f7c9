"""The parts of scripts/gpu_check.py. Whatever reads or judges results is a pure function, and has tests."""
