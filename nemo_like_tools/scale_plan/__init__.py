"""Estimates the cost of a step at sizes that nobody has measured; scripts/plan_scale.py prints it.

lengths          how long responses are, by mean and maximum
recipe_workload  a step's batch and its layout at a number of GPUs, from a recipe
hardware         data sheets, and what share of them a kernel reaches
generation       an engine decodes its batch
training         log-probs and updates
weight_costs     trainer to engines
host_costs       driver, data plane and rollout actor, from what was measured
step             all of it together
published        the steps that other projects have published
tables           Markdown
"""
