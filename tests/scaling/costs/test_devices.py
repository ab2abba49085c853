"""Accelerators by name."""

import pytest

from scaling.costs import devices


def test_the_lectures_price_list_of_rates() -> None:
    rates = {
        name: devices.find_device(name).bfloat16 for name in ("a100", "V100", "t4")
    }
    assert rates == {"a100": 312e12, "V100": 125e12, "t4": 65e12}


def test_an_a100_turns_at_200_operations_per_byte() -> None:
    assert devices.find_device("a100-40").ridge() == pytest.approx(200.64, abs=0.01)


def test_memory_is_what_drivers_report() -> None:
    """81,559 MiB for an H100 of 80 GB; the data sheet's size where none is reported."""
    assert devices.find_device("b300_sxm").memory_bytes == 275040 * 2**20
    assert devices.find_device("gb300").rate("float4") == 15e15
    with pytest.raises(ValueError, match="h100 has no units for float4"):
        devices.find_device("h100").rate("float4")
    names = ("h100", "a100-80gb", "h200", "l40s", "rtx-pro-6000")
    devices_by_name = {x: devices.find_device(x) for x in names}
    mib = [x.memory_bytes / 2**20 for x in devices_by_name.values()]
    assert mib == [81559, 81920, 143771, 46068, 97887]
    assert [x.sheet_bytes / 1e9 for x in devices_by_name.values()] == [
        80,
        80,
        141,
        48,
        96,
    ]
    assert devices.find_device("H100 80GB") == devices_by_name["h100"]
    name = "RTX PRO 6000 Blackwell Server Edition"
    assert devices.find_device(name) == devices_by_name["rtx-pro-6000"]
    tpu = devices.find_device("tpu-v5e")
    assert tpu.memory_bytes == tpu.sheet_bytes == 16e9
    for device in devices.DEVICES.values():
        assert 0.94 < device.memory_bytes / device.sheet_bytes < 1.08


def test_every_device_is_whole() -> None:
    for device in devices.DEVICES.values():
        assert 0 < device.link < device.bandwidth < device.memory_bytes * 1000
        assert device.source
        assert device.measured_products < device.bfloat16
        assert device.measured_bandwidth < device.bandwidth
        measured = device.measured_products or device.measured_bandwidth
        assert bool(measured) == bool(device.measured_source)
