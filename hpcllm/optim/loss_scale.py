"""Loss scale: types of numbers in a step, and how fp16 keeps small gradients from vanishing.

    weights, activations, their gradients     fp32, bf16 or fp16
    sums of gradients, master weights, AdamW  fp32 always

fp16 has five exponent bits: gradients below 2^-24 become zero. The loss is multiplied by a scale, and so is every
gradient of it; the update divides by it. Where the scale is too large a gradient becomes infinite: all ranks see that
in the norm they agree on, skip the step and halve the scale; after many good steps it is doubled.

    scale      65536   65536   32768   32768  ...  32768   65536
    norm        4.1     inf     4.0     3.9         3.1     3.1       (divided by the scale)
    update      yes     no      yes     yes         yes     yes

Source: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcllm.config.schema import Config

LARGEST_SCALE = 2.0**32  # gradients that are all zero would otherwise double it without end


@dataclass
class LossScale:
    """Factor of the loss; the same on all ranks, for it follows from what they agree on."""

    value: float = 1.0
    double_after: int = 0  # steps without overflow; 0: it stays as it is
    good_steps: int = 0  # since it last changed

    @property
    def is_dynamic(self) -> bool:
        return self.double_after > 0

    def restore(self, value: float, good_steps: int) -> None:
        """Go on with the scale of a saved fp16 run."""
        if self.is_dynamic:
            self.value, self.good_steps = value, good_steps

    def good_step(self) -> None:
        """No gradient overflowed."""
        self.good_steps += 1
        if self.is_dynamic and self.good_steps == self.double_after:
            self.value, self.good_steps = min(2 * self.value, LARGEST_SCALE), 0

    def overflow(self) -> bool:
        """A gradient overflowed: halve the scale; false if it cannot go lower than the 1 that it was."""
        could_be_halved = self.value > 1.0
        self.value, self.good_steps = max(self.value / 2, 1.0), 0
        return could_be_halved


def make_loss_scale(config: Config) -> LossScale:
    """Dynamic for fp16; a constant 1 for types with the range of fp32."""
    if config.precision.compute != "fp16":
        return LossScale()
    return LossScale(config.precision.loss_scale, config.precision.loss_scale_steps)
