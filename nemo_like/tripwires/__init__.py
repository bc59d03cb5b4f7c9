"""Checks in every step for bugs that raise no error.

Each process takes the numbers where its data are (``Measured`` names them), and the driver judges. Expected
values are computed here a second time, from the formulas of the documentation, by code that shares nothing
with the code under check.
"""
