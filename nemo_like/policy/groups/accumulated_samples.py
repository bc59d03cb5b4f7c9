"""The driver's record of which samples the workers of a group have accumulated. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import TagValue
from nemo_like.data_plane.storage_errors import listed


class AccumulatedSamples:
    """The samples of the step's first update whose gradients the workers hold, with the tags that went into
    them."""

    def __init__(self, update_size: int) -> None:
        """Start with no sample; ``update_size`` is the number of samples of an update."""
        self._update_size = update_size
        self._tags: dict[str, Mapping[str, TagValue]] = {}
        self.num_computed = 0  # idle samples need not be computed

    def check_new(self, batch: KVBatchMeta) -> None:
        """Raise ValueError when a sample was accumulated before, or when the batch has more samples than the
        update lacks."""
        if again := [sample for sample in batch.sample_ids if sample in self._tags]:
            raise ValueError(f"{batch.occasion}: samples {listed(again)} were accumulated before")
        if len(self._tags) + len(batch) > self._update_size:
            raise ValueError(
                f"{batch.occasion}: {len(self._tags)} samples were accumulated, and with {len(batch)} more "
                f"they are over train_global_batch_size={self._update_size}; only those of the first update "
                "can be accumulated"
            )

    def add(self, batch: KVBatchMeta, num_computed: int) -> None:
        """Note that the workers hold the gradients of these samples, and that they computed ``num_computed``
        of them."""
        self._tags |= _tags_of_samples(batch)
        self.num_computed += num_computed

    def check(self, batch: KVBatchMeta, num_accumulated: int) -> None:
        """Raise ValueError unless ``num_accumulated`` samples were accumulated, and they are none, or the
        first update of ``batch`` with the same tags."""
        if num_accumulated != len(self._tags):
            raise ValueError(
                f"{batch.occasion}: {len(self._tags)} samples were accumulated, and train was told of "
                f"{num_accumulated}; tell it of all of them, or settle first, which drops them"
            )
        if num_accumulated not in (0, self._update_size):
            raise ValueError(
                f"{batch.occasion}: only {num_accumulated} samples of the first update were accumulated; "
                f"accumulate all of train_global_batch_size={self._update_size} before training"
            )
        for sample, tags in _tags_of_samples(batch.slice(0, num_accumulated)).items():
            if sample not in self._tags:
                raise ValueError(
                    f"{batch.occasion}: sample {sample} of the first update was not accumulated, but others "
                    "were; accumulate the samples with which the batch begins"
                )
            for name, value in tags.items():
                before = self._tags[sample].get(name)
                if before != value and not (before != before and value != value):  # nan is nan
                    raise ValueError(
                        f"{batch.occasion}: tag {name} of sample {sample} was {before} when it was "
                        f"accumulated, and is {value} in training; accumulate when the tags are final"
                    )

    def clear(self) -> None:
        """Forget all samples."""
        self._tags, self.num_computed = {}, 0


def _tags_of_samples(batch: KVBatchMeta) -> dict[str, Mapping[str, TagValue]]:
    return {
        sample: {name: values[index] for name, values in batch.tags.items()}
        for index, sample in enumerate(batch.sample_ids)
    }
