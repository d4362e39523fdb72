"""Bytes of one rank that do not depend on the rollouts: weights, gradients, optimizer, and the host's buffers.

Formulas of `engine/gradients.py` (gradients of a step accumulate whole, in float32, float64 for a float64 model), of
`engine/gradient_shards.py` (a rank keeps its part of each) and of DeepSpeed 0.19, over the G = dp * cp ranks that hold
the same shard of n elements:

- ZeRO 0: an optimizer state per element; a float32 master beside it for bfloat16 weights;
- ZeRO 1, 2: masters and optimizer state of 1 / G of the elements, padded to a multiple of 2 G in all;
- ZeRO 3: the same, padded parameter by parameter, and 1 / G of the weights and of their gradients; parameters of at
  most `persistent` elements also whole;
- gradients reduced in every pass: 1 / G of them, padded parameter by parameter; with ZeRO 3 in DeepSpeed's own buffer.

Always true:
- sizes are those of the tensors, to the byte; Adam's step counters (4 bytes a tensor) are left out; buffers and update
  are upper bounds;
- the shards of all G ranks hold every element, and the same number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LIVE_ELEMENTS = 1_000_000_000  # stage3_max_live_parameters
MASTER_BYTES = 4
REDUCED_BYTES = 4  # communication_data_type is float32


@dataclass(frozen=True, slots=True)
class HostShape:
    """How a host holds a model.

    Attributes:
        zero: DeepSpeed's stage.
        ranks: number of ranks that hold the same shard, dp * cp.
        dtype_bytes: of weights.
        moments: float32 values that the optimizer keeps per element: 2 for Adam, 1 for SGD with momentum, else 0.
        persistent: ZeRO 3 keeps parameters of at most so many elements whole (stage3_param_persistence_threshold).
        bucket: elements that are reduced at a time (reduce_bucket_size); without effect with `each_pass`.
        each_pass: gradients are reduced in every pass (`zero.reduce: pass`, stages 2 and 3).
    """

    zero: int
    ranks: int
    dtype_bytes: int
    moments: int
    persistent: int = 100_000
    bucket: int = 500_000_000
    each_pass: bool = False


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes on one rank.

    Attributes:
        weights: what stays between passes.
        gradients: accumulated over the passes of a step.
        optimizer: masters and moments; with ZeRO 3 also the reduced gradients, whose buffer stays.
        buffers: ZeRO 3: the reduction bucket, and what its passes gather at most at a time; with reduction in every
            pass, one gradient in float32 and its part.
        update: more during the reduction and the update, when no state of prefixes exists: the bucket, the reduced
            gradients of this rank in the weights' dtype and in float32; with reduction in every pass, ZeRO 2 has no
            bucket, but hands over one whole gradient at a time.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    update: int

    @property
    def in_passes(self) -> int:
        """Held while passes run."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def in_update(self) -> int:
        """Held during the update."""
        return self.in_passes + self.update


def owned_elements(elements: Sequence[int], host: HostShape) -> int:
    """Elements whose masters and moments one rank keeps, padding included."""
    if host.zero == 0:
        return sum(elements)
    if host.zero == 3:
        return sum(-(-count // host.ranks) for count in elements)
    alignment = 2 * host.ranks
    return -(-sum(elements) // alignment) * alignment // host.ranks


def model_bytes(elements: Sequence[int], host: HostShape) -> ModelBytes:
    """Bytes of one rank's shard of the model.

    Args:
        elements: of each parameter of the shard.
        host: how it is held.
    """
    if host.each_pass:
        return _each_pass(elements, host)
    size, total, owned = host.dtype_bytes, sum(elements), owned_elements(elements, host)
    accumulated = 8 if size == 8 else 4
    masters = MASTER_BYTES if host.zero > 0 or size < MASTER_BYTES else 0
    moment_bytes = accumulated if host.zero == 0 and masters == 0 else MASTER_BYTES
    optimizer = owned * (masters + host.moments * moment_bytes)
    bucket = host.bucket * REDUCED_BYTES if host.zero > 0 else 0
    update = owned * (size + MASTER_BYTES) + bucket if host.zero > 0 else 0
    if host.zero < 3:
        return ModelBytes(total * size, total * accumulated, optimizer, 0, update)
    persistent = sum(count for count in elements if count <= host.persistent)
    gathered = min(total - persistent, LIVE_ELEMENTS)
    return ModelBytes(
        weights=(owned + persistent) * size,
        gradients=total * accumulated,
        optimizer=optimizer + owned * size,
        buffers=bucket + gathered * size,
        update=owned * MASTER_BYTES,
    )


def _each_pass(elements: Sequence[int], host: HostShape) -> ModelBytes:
    """Gradients reduced in every pass, in float32; DeepSpeed's partitions of them are float32 too."""
    once = model_bytes(elements, replace(host, each_pass=False, bucket=0))
    parts, largest = sum(-(-count // host.ranks) for count in elements), max(elements)
    buffers = once.buffers + (largest + -(-largest // host.ranks)) * REDUCED_BYTES
    if host.zero == 3:
        optimizer = once.optimizer + parts * (REDUCED_BYTES - host.dtype_bytes)
        return replace(once, gradients=0, optimizer=optimizer, buffers=buffers)
    # A float32 model's partition is a list of zeros, whole where it cuts through a parameter, and flattened later.
    owned = owned_elements(elements, host)
    update = owned + largest if host.dtype_bytes < MASTER_BYTES else 2 * owned + 3 * largest
    return replace(once, gradients=parts * REDUCED_BYTES, buffers=buffers, update=update * REDUCED_BYTES)
