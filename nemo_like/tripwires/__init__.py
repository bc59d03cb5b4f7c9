"""Checks of every step that look for bugs which raise no error: what is measured, and what it must be.

Processes measure where the data are (``Measured`` names the numbers); the driver judges. What is compared
with is computed a second time here, from the formulas of the documentation, and shares no code with what it
checks.
"""
