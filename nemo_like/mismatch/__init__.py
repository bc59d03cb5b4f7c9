"""Finds where an engine and a trainer disagree: whether at all, in which module, by a weight or by how it
computes.

    parties       one engine and one replica of the trainer, started with a run's own classes
    certificate   their log-probs beside those of transformers, as loaded and after training steps
    search        both layer by layer, for one sample
    past_run      the sample and the checkpoint of a run that is over
"""
