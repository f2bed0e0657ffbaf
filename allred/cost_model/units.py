"""Rates, times and sizes as text, such as 100Gbit/s, 5us and 64MiB."""

import math
import re

# Of an amount in a base unit: bytes per second, seconds, bytes.
RATES = {
    **{f"{prefix}bit/s": 1000**power / 8 for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}B/s": float(1000**power) for power, prefix in enumerate(("", "k", "M", "G", "T"))},
}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {
    **{f"{prefix}B": 1000.0**power for power, prefix in enumerate(("", "k", "M", "G"))},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate(("K", "M", "G"), start=1)},
}


def parse(text: str, units: dict[str, float]) -> float:
    """Return a finite number >= 0 in the base unit. Raises ValueError.

    >>> parse("100Gbit/s", RATES), parse("12.5 GB/s", RATES), parse("0.2ms", TIMES), parse("64KiB", SIZES)
    (12500000000.0, 12500000000.0, 0.0002, 65536.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S+)\s*", text)
    try:
        value = float(found[1]) * units[found[2]] if found else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"expected a number and one of {', '.join(units)}, got {text!r}")
    return value


def show(value: float, units: dict[str, float]) -> str:
    """Return three significant digits in the largest unit that is not larger than the value.

    >>> show(12.5e9, RATES), show(5e-6, TIMES), show(102.23e6, SIZES), show(0, TIMES)
    ('12.5 GB/s', '5 us', '97.5 MiB', '0 s')
    """
    if not value or not math.isfinite(value):
        return f"{value:g} {next(name for name, factor in units.items() if factor == 1)}"
    fitting = {name: factor for name, factor in units.items() if factor <= value * (1 + 1e-9)}
    name = max(fitting, key=lambda name: fitting[name]) if fitting else min(units, key=lambda name: units[name])
    digits = value / units[name]
    return f"{digits:.0f} {name}" if digits >= 100 else f"{digits:.3g} {name}"
