import pytest

from acclimate.report import numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.72, "0.720"), (-0.0123, "−0.012"), (0.0, "0.000"), (0.00012, "0.00012"), (13.6266, "13.627"), (123.45, "123.5"),
        (12345.6, "12,346"), (2e9, "2e+09"), (1234, "1,234"), (None, "–"), (float("nan"), "not a number"),
        (float("inf"), "∞"), (float("-inf"), "−∞"), ("text", "text"), (True, "True"),
    ],
)  # fmt: skip
def test_number(value, text):
    assert numbers.number(value) == text


def test_signed_and_interval_and_p():
    assert [numbers.signed(v) for v in (0.5, -0.5, 0.0, None)] == ["+0.500", "−0.500", "0.000", "–"]
    assert numbers.interval({"low": -0.1, "high": 0.25}) == "−0.100 to 0.250"
    assert numbers.interval(None) == numbers.interval({"low": None}) == ""
    assert [numbers.p_value(v) for v in (0.0002, 0.04, None)] == ["< 0.001", "0.040", "–"]


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (980, "980 B"), (999.7, "1 kB"), (1_848_320, "1.8 MB"), (1_234_567_890, "1.2 GB"), (512e9, "512 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_size(n, text):
    assert numbers.size(n) == text


def test_count():
    assert [numbers.count(n) for n in (0, 960, 460_800, 134_515_008, 7.2e9)] == [
        "0",
        "960",
        "460,800",
        "134.5 M",
        "7.2 G",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (1.258, "1.3 s"), (59.96, "1 m 00 s"), (151, "2 m 31 s"), (3599.6, "1 h 00 m"), (3840, "1 h 04 m"), (90061, "25 h 01 m")],
)  # fmt: skip
def test_duration(seconds, text):
    assert numbers.duration(seconds) == text
