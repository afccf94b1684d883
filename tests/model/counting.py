"""Counts what operations of PyTorch launch and move, as on a device: for tests that compare two ways to compute."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = (
    *("view", "_unsafe_view", "slice", "unsqueeze", "squeeze", "select", "unbind", "split", "split_with_sizes"),
    *("detach", "alias", "expand", "t", "transpose"),
)
OVERWRITE = ("copy_", "zero_", "fill_", "index_copy_")  # whose first operand is not read


class Counting(TorchDispatchMode):
    """`with Counting() as counting:` counts launches, and the bytes of all operands and results, which it adds up.

    An operation of PyTorch's counts as one launch, of a kernel that reads each operand and writes each result once: no
    more than it takes on a device. What lies in a view is what counts, not the memory that it is a view of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.moved_bytes = 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        name = function._schema.name.removeprefix("aten::")
        if not name.startswith(("empty", "new_empty")) and name not in VIEWS:
            overwrites = name in OVERWRITE or (name.startswith("addmm") and options.get("beta") == 0)
            read = tree_leaves((arguments[overwrites:], {key: x for key, x in options.items() if key != "out"}))
            self.count(read + tree_leaves(result))
        return result

    def count(self, values) -> None:
        """Count one launch, and the bytes of the tensors among its operands and results."""
        self.launches += 1
        self.moved_bytes += sum(x.nbytes for x in values if isinstance(x, Tensor))
