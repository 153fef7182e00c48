"""Formats of numbers and texts for readers."""

import json

MAX_TEXT_CHARS = 2000


def amount(value: float) -> str:
    """Format a number with three digits: 0.614, 12.3; thousands separated: 20,413; powers written out: 1.2×10⁻⁷."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 1e-4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    times_ten = "\N{MULTIPLICATION SIGN}10"
    return mantissa + times_ten + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def duration(seconds: float) -> str:
    """Format seconds in suitable units: 210 ms, 8.4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def clipped(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    left_out = len(text) - MAX_TEXT_CHARS
    return text if left_out <= 0 else f"{text[:MAX_TEXT_CHARS]} … {left_out:,} more characters"
