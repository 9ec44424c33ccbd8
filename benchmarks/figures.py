"""What a tool reported, held against the truth.

True are a stream's first emission less the arrival of its request, and the gaps between its emissions. Percentiles are
compared with those of the truth, reported less true; where a tool tells of each stream, its times are compared one by
one, too, without sign.
"""

import numpy as np
import numpy.typing as npt
import tools
import watch

Figures = dict[str, float]
_Values = npt.NDArray[np.float64]


def figures(watched: watch.Watched) -> Figures:
    """Return accuracy and cost of one run by name; a figure that the tool does not have is absent."""
    emitted = {name: np.array(times) for name, times in watched.emitted.items()}
    ttfts_ms = {name: float(times[0] - watched.arrived[name]) / 1e6 for name, times in emitted.items()}
    gaps_ms = {name: np.diff(times) / 1e6 for name, times in emitted.items()}
    found, cost = watched.found, watched.cost
    events = sum(map(len, emitted.values()))
    return {
        **_percentiles("TTFT", found.ttft_ms, np.array(list(ttfts_ms.values()))),
        **_percentiles("ITL", found.itl_ms, np.concatenate(list(gaps_ms.values()))),
        **_one_by_one(found, ttfts_ms, gaps_ms),
        "events/s": events / cost.read_s,
        "behind at the end, s": cost.behind_s,
        "CPU per token event, µs": cost.cpu_s * 1e6 / events,
        "CPU, % of a core": 100 * cost.cpu_s / cost.read_s,
        "others' CPU on its core, %": 100 * max(0.0, cost.core_cpu_s - cost.cpu_s) / cost.read_s,
        "peak memory, MiB": cost.peak_bytes / 2**20,
        "emitter's share of its core": watched.core_share,
        "emitted late p99, ms": watched.late_p99_us / 1e3,
        **(
            _percentiles("TPOT", found.tpot_ms, np.array([x.mean() for x in gaps_ms.values()])) if found.tpot_ms else {}
        ),
    }


def _percentiles(metric: str, reported_ms: tuple[float, ...], true_ms: _Values) -> Figures:
    result = {}
    for index, percentile in enumerate(tools.PERCENTILES):
        name, true = f"{metric} p{percentile}", float(np.percentile(true_ms, percentile))
        if reported_ms:
            result[f"{name} reported, ms"] = reported_ms[index]
        result[f"{name} true, ms"] = true
        if reported_ms:
            result[f"{name} error, ms"] = reported_ms[index] - true
    return result


def _one_by_one(found: tools.Found, ttfts_ms: dict[str, float], gaps_ms: dict[str, _Values]) -> Figures:
    if not found.gaps_s:
        return {}
    ttft = [abs(found.ttfts_s[name] * 1e3 - true) for name, true in ttfts_ms.items() if name in found.ttfts_s]
    gaps = np.concatenate([_off_ms(found.gaps_s[name], true) for name, true in gaps_ms.items() if name in found.gaps_s])
    return {
        **{f"error of one TTFT p{q}, ms": float(np.percentile(ttft, q)) for q in tools.PERCENTILES},
        **{f"error of one gap p{q:g}, ms": float(np.percentile(gaps, q)) for q in (*tools.PERCENTILES, 99.9)},
    }


def _off_ms(reported_s: list[float], true_ms: _Values) -> _Values:
    """Return how far off each gap is; a tool that took the role for a token has a gap too many, the first."""
    reported_ms = np.array(reported_s[-len(true_ms) :]) * 1e3
    off_ms: _Values = np.abs(reported_ms - true_ms[-len(reported_ms) :])
    return off_ms
