"""The smooth roofline, and the naive one that fits must beat."""


def smooth_max(a: float, b: float, sharpness: float) -> float:
    """(a^p + b^p)^(1/p) of two times: at least the greater, at most their sum; safe at any scale.

    Source: FORMULAS section 1, `c + (t_compute^p + t_memory^p)^(1/p)`, p in 1…12.
    """
    if a < b:
        a, b = b, a
    if b <= 0.0:
        return a
    return float(a * (1.0 + (b / a) ** sharpness) ** (1.0 / sharpness))


def naive_time_s(flops: float, moved: float, peak_flops: float, peak_bytes_s: float) -> float:
    """The roofline of a data sheet, seconds: the greater of compute and memory time at peak rates."""
    return max(flops / peak_flops, moved / peak_bytes_s)
