"""What nodes tell of their energy: each source counts once what it says it counts, and all of it."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import time
from pathlib import Path

import energy_nodes as nodes
import pytest
from c_libraries import compiled
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.system.energy import sources
from hpcllm.system.energy.meter import Meter, metering
from hpcllm.system.energy.sources import (
    FINDERS,
    MissingSourceError,
    PowerIntegral,
    Source,
    find_cray,
    find_hwmon,
    find_nvml,
    find_rapl,
    find_source,
)

joules = st.floats(0, 1e6)


def meter(source: Source) -> Meter:
    """One that looks whenever it is asked."""
    return Meter(Source(**(vars(source) | {"fresh_s": 0.0})))


def made_up(readings: list[list[float]], **more) -> Source:
    """A source that says one list after the other, then fails."""
    left = iter(readings)

    def read() -> list[float]:
        try:
            return next(left)
        except StopIteration:
            raise OSError("the board is gone") from None

    return Source("rapl", read, tuple(range(len(readings[0]))), **more)


@given(st.lists(st.lists(joules, min_size=2, max_size=2), min_size=1, max_size=8))
def test_a_meter_adds_up_what_counters_rise_by_wherever_they_begin_anew(steps):
    """Whatever counters show modulo their range, the meter says what was really taken."""
    range_j, shown, total = 2e6, [123.0, 1.9e6], 0.0
    readings = [list(shown)]
    for step in steps:
        shown = [(value + more) % range_j for value, more in zip(shown, step, strict=True)]
        readings.append(list(shown))
    found = meter(made_up(readings, wraps_at_j=(range_j, range_j)))
    for step in steps:
        total += sum(step)
        assert found.joules().total == pytest.approx(total, abs=1e-3)


def test_a_counter_without_a_range_that_falls_was_reset_and_gains_nothing():
    found = meter(made_up([[100.0], [150.0], [20.0], [50.0]]))
    assert [round(found.joules().total) for _ in range(3)] == [50, 50, 80]


def test_a_source_that_vanishes_is_no_longer_read_and_what_it_said_stays():
    found = meter(made_up([[100.0], [150.0]]))
    assert found.joules().total == 50
    assert [found.joules().total for _ in range(3)] == [50, 50, 50]
    assert found.lost == "the board is gone"


def test_a_source_that_vanishes_before_its_first_reading_says_nothing():
    source = Source("rapl", lambda: [float(Path("/nowhere/energy").read_text())], (0,))
    found = meter(source)
    assert (found.joules().total, bool(found.lost)) == (0.0, True)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1000)), min_size=1, max_size=10))
def test_power_adds_up_to_its_area(looks):
    """Exactly where it is linear between two looks."""
    now, watts, area = 0.0, 0.0, 0.0
    integral = PowerIntegral(lambda: [watts, 2 * watts], lambda: now)
    integral.read()
    for pause, power in looks:
        area += pause * (watts + power) / 2
        now, watts = now + pause, power
        assert integral.read() == pytest.approx([area, 2 * area])


@pytest.mark.parametrize("accelerators", [(), (10.0, 20.0, 30.0, 40.0)])
def test_a_cray_node_counts_whole_with_its_accelerators_inside(tmp_path, accelerators):
    nodes.cray(tmp_path, 5000, accelerators)
    source = find_cray(tmp_path)
    found = meter(source)
    nodes.cray(tmp_path, 5600, tuple(value + 50 for value in accelerators), freshness=2)
    assert found.joules() == (600, 50 * len(accelerators))


def test_counters_that_were_written_anew_meanwhile_are_read_again(tmp_path, monkeypatch):
    """The board writes between two of our reads: what is taken is all of one moment."""
    nodes.cray(tmp_path, 1000, (100.0,))
    reads = []

    def read(path: Path) -> float:
        if path.name == "accel0_energy" and "accel0_energy" not in reads:
            nodes.cray(tmp_path, 2000, (200.0,), freshness=2)
        reads.append(path.name)
        return plain(path)

    plain = sources.number_in
    monkeypatch.setattr(sources, "number_in", read)
    find_cray(tmp_path)
    assert reads.count("energy") == 2
    assert list(find_cray(tmp_path).read()) == [2000, 200]


def test_a_board_that_never_comes_to_rest_is_taken_as_it_is(tmp_path, monkeypatch):
    nodes.cray(tmp_path, 1000)
    ticks = iter(range(1000))
    monkeypatch.setattr(sources, "_freshness", lambda _: next(ticks))
    assert list(find_cray(tmp_path).read()) == [1000]


def test_packages_and_their_memory_count_and_no_part_of_them_twice(tmp_path):
    zones = {
        "intel-rapl:0": ("package-0", 10.0),
        "intel-rapl:0:0": ("core", 1.0),
        "intel-rapl:0:1": ("dram", 2.0),
        "intel-rapl:1": ("package-1", 20.0),
        "intel-rapl:2": ("psys", 500.0),
        "intel-rapl-mmio:0": ("package-0", 10.0),
    }
    nodes.rapl(tmp_path, zones)
    source = find_rapl(tmp_path)
    assert sorted(source.read()) == [2, 10, 20]
    found = meter(source)
    nodes.rapl(tmp_path, {zone: (name, value + 7) for zone, (name, value) in zones.items()})
    assert found.joules().total == pytest.approx(21)


def test_a_package_that_begins_anew_goes_on(tmp_path):
    nodes.rapl(tmp_path, {"intel-rapl:0": ("package-0", 65_530.0)})
    found = meter(find_rapl(tmp_path))
    nodes.rapl(tmp_path, {"intel-rapl:0": ("package-0", 4.0)})
    assert found.joules().total == pytest.approx(10)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_counters_for_root_alone_are_said_to_be_that(tmp_path):
    nodes.rapl(tmp_path, {"intel-rapl:0": ("package-0", 1.0)})
    (tmp_path / "class" / "powercap" / "intel-rapl:0" / "energy_uj").chmod(0)
    with pytest.raises(MissingSourceError, match="for root alone"):
        find_rapl(tmp_path)


@pytest.mark.parametrize("second", [{"power1_average": 0}, {"power1_average": 300e6}, {}])
def test_two_gcds_of_a_package_count_once(tmp_path, second):
    """The second GCD of an MI250X says 0, the same, or nothing."""
    for package in range(2):
        nodes.gcd(tmp_path, 2 * package, f"6926{package}", power1_average=300e6)
        nodes.gcd(tmp_path, 2 * package + 1, f"6926{package}", **second)
    source = find_hwmon(tmp_path)
    before, start = source.read(), time.monotonic()
    time.sleep(0.05)
    gained = sum(source.read()) - sum(before)
    assert gained == pytest.approx(2 * 300 * (time.monotonic() - start), rel=0.2)


def test_cards_without_a_serial_number_count_each_and_displays_do_not(tmp_path):
    for card in range(3):
        nodes.gcd(tmp_path, card, "0000000000000000", power1_input=100e6)
    nodes.gcd(tmp_path, 7, "0000000000000000", temp1_input=40_000)
    assert len(find_hwmon(tmp_path).counted) == 3


def test_a_count_of_energy_is_better_than_a_look_at_power(tmp_path):
    nodes.gcd(tmp_path, 0, "1", energy1_input=5e6, power1_average=1e6)
    source = find_hwmon(tmp_path)
    assert (list(source.read()), source.tick_s) == ([5.0], None)


def test_gpus_that_all_fall_silent_are_lost_not_idle(tmp_path):
    nodes.gcd(tmp_path, 0, "1", power1_average=100e6)
    found = meter(find_hwmon(tmp_path))
    shutil.rmtree(tmp_path / "class")
    found.joules()
    assert "power1_average" in found.lost


def test_the_first_source_that_is_there_is_taken(tmp_path):
    nodes.rapl(tmp_path, {"intel-rapl:0": ("package-0", 1.0)})
    nodes.gcd(tmp_path, 0, "1", power1_average=1e6)
    assert find_source("auto", False, tmp_path).name == "rapl"
    assert find_source("auto", True, tmp_path).name == "hwmon"
    nodes.cray(tmp_path, 1000)
    for on_gpus in (False, True):
        assert find_source("auto", on_gpus, tmp_path).name == "pm_counters"
        assert find_source("rapl", on_gpus, tmp_path).name == "rapl"


@pytest.mark.parametrize("name", [*FINDERS, "auto"])
def test_a_source_that_is_not_there_says_what_it_looked_for(tmp_path, name):
    if ctypes.util.find_library("nvidia-ml") and name in ("nvml", "auto"):
        pytest.skip("this machine has one")
    with pytest.raises(MissingSourceError, match=r"no .*") as raised:
        find_source(name, True, tmp_path)
    assert not raised.value.is_there


@pytest.mark.parametrize("text", ["", "n/a", "\xff\xfe"])
def test_a_file_that_says_no_number_is_a_source_that_is_there_and_cannot_be_read(tmp_path, text):
    nodes.cray(tmp_path, 1000)
    (tmp_path / "cray" / "pm_counters" / "energy").write_text(text, encoding="latin-1")
    with pytest.raises(MissingSourceError) as raised:
        find_source("auto", False, tmp_path)
    assert raised.value.is_there


def test_power_is_looked_at_while_nobody_asks(tmp_path):
    nodes.gcd(tmp_path, 0, "1", power1_average=1e9)
    source = find_hwmon(tmp_path)
    with metering(Source(**(vars(source) | {"tick_s": 0.01, "fresh_s": 0.0}))) as found:
        time.sleep(0.1)
        before = found._gained_j[0]
    assert before > 10  # joules of some ninety milliseconds at a kilowatt


NVML = r"""
static unsigned long long joules[2] = {1000, 5000};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned k, void **device) { *device = &joules[k]; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { *mw = 100000; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) {
    if (NOT_SUPPORTED && device == &joules[1]) return 3;
    *mj = *(unsigned long long *)device += 250;
    return 0;
}
"""


@pytest.fixture(params=[0, 1], ids=["counts", "old device"])
def driver(request, tmp_path):
    """A library with NVML's calls, for want of a driver."""
    library = compiled(tmp_path / "libnvidia-ml.so.1", NVML, [f"-DNOT_SUPPORTED={request.param}"])
    return library, bool(request.param)


def test_nvml_counts_all_devices_or_looks_at_their_power(driver):
    library, is_old = driver
    source = find_nvml(Path("/sys"), str(library))
    before, after = source.read(), source.read()
    gained = [new - old for old, new in zip(before, after, strict=True)]
    assert source.tick_s is not None if is_old else gained == pytest.approx([0.25, 0.25])
