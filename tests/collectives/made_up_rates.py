"""Made-up rates of an allocation, for tests of what is predicted and chosen."""

from __future__ import annotations

from hypothesis import strategies as st

from hpcllm.collectives.cost import COSTS
from hpcllm.collectives.tuning import Coding, LibraryCall, Link, Rates, Shape, Tuning


def made_up(far_gb_s: float = 0.12, near_gb_s: float = 8.0, library_gb_s: float | None = None, **changes) -> Rates:
    """A node of fast cores on a network of that speed; the library is as fast as the slower link."""
    slowest_gb_s = library_gb_s or min(far_gb_s, near_gb_s)
    slowest = LibraryCall(3e-6, slowest_gb_s, slowest_gb_s, slowest_gb_s)
    names = {"raw": (1.0, 1e3), "int8:256": (3.938, 4.0), "exp": (1.15, 1.0), "bf16": (2.0, 8.0)}
    codings = {
        (name, dtype): Coding(name, ratio if dtype == "float32" else max(1.0, ratio / 2), rate, min(rate, 10.0), 6.0)
        for name, (ratio, rate) in names.items()
        for dtype in ("float32", "bfloat16")
    }
    rates = {
        "near": Link(2e-6, near_gb_s),
        "far": Link(2e-5, far_gb_s),
        "window": Link(1e-5, 20.0),
        "call_s": 2e-6,
        "setup_s": 3e-5,
        "message_s": 4e-6,
        "copy_gb_s": 10.0,
        "memory_gb_s": 8.0,
        "codings": codings,
        "library": dict.fromkeys(COSTS, slowest),
    }
    return Rates(**(rates | changes))


def made_up_tuning(**changes) -> Tuning:
    facts = {"machine": 'a "node"\x7f \n é', "library": "MPI 1.0", "date": "today", "ranks": 4, "nodes": 2}
    return Tuning(made_up(**changes), facts)


shapes = st.integers(1, 40).flatmap(
    lambda ranks: st.integers(1, ranks).map(lambda nodes: Shape(ranks, nodes, max(1, ranks // nodes)))
)
speeds = st.floats(1e-3, 1e3)
links = st.builds(Link, st.floats(1e-7, 1e-2), speeds)


@st.composite
def codings(draw) -> Coding:
    """Raw or a codec."""
    if draw(st.booleans()):
        return Coding("raw", 1.0, draw(speeds), draw(speeds), draw(speeds))
    return Coding("int8:256", draw(st.floats(1, 8)), draw(speeds), draw(speeds), draw(speeds))


rates = st.builds(
    Rates,
    near=links,
    far=links,
    window=links,
    call_s=st.floats(1e-7, 1e-4),
    setup_s=st.floats(1e-7, 1e-4),
    message_s=st.floats(1e-7, 1e-4),
    copy_gb_s=speeds,
    memory_gb_s=speeds,
)
sizes = st.integers(1, 1 << 32)
