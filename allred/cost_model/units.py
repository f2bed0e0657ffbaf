"""Rates, times and sizes as text, such as 100Gbit/s, 5us and 64MiB."""

import math
import re

# Units in bytes per second, seconds and bytes.
RATES = {f"{prefix}B/s": 1000.0**power for power, prefix in enumerate(("", "k", "M", "G"))}
RATES |= {f"{prefix}bit/s": 1000.0**power / 8 for power, prefix in enumerate(("", "k", "M", "G"))}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {f"{prefix}B": 1024.0**power for power, prefix in enumerate(("", "Ki", "Mi", "Gi"))}


def parse(text: str, units: dict[str, float]) -> float:
    """Return a number >= 0 of a unit. Raises ValueError.

    >>> parse("100Gbit/s", RATES), parse("12.5 GB/s", RATES), parse("0.2ms", TIMES), parse("64KiB", SIZES)
    (12500000000.0, 12500000000.0, 0.0002, 65536.0)
    """
    text = text.replace("\N{MICRO SIGN}", "u").replace("\N{GREEK SMALL LETTER MU}", "u")
    found = re.fullmatch(r"(\d+(?:\.\d*)?) *(\S+)", text)
    if not found or found[2] not in units or math.isinf(float(found[1])):
        raise ValueError(f"expected a number and one of {', '.join(units)}, got {text!r}")
    return float(found[1]) * units[found[2]]


def show(value: float, units: dict[str, float]) -> str:
    """Return three significant digits in the largest unit that is not larger than the value, or in the smallest one.

    >>> show(12.5e9, RATES), show(5e-6, TIMES), show(102.23e6, SIZES), show(0, TIMES)
    ('12.5 GB/s', '5 us', '97.5 MiB', '0 s')
    """
    if not value:
        return f"0 {next(name for name in units if units[name] == 1)}"
    names = [name for name in units if "bit" not in name]
    name = [name for name in names if units[name] <= value * (1 + 1e-9)][-1:] or names[:1]
    digits = value / units[name[0]]
    return f"{digits:.0f} {name[0]}" if digits >= 100 else f"{digits:.3g} {name[0]}"
