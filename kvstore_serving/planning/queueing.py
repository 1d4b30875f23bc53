"""Closed forms for the time to the first token of prompts of one length that arrive at random (Poisson).

A prefill engine without batching is a queue with one server (M/D/1) with service time D and arrival rate R. The time to
the first token is the wait plus the service time. A prefill can be spread over N devices in two ways, with different
effects (DistServe, Zhong et al., OSDI 2024, section 3.1):

* *inter-op* (pipeline): N stages take D/N each. A prompt still takes D, but the next prompt enters after D/N.
* *intra-op* (tensor parallelism): every prompt takes D/K, where the speed-up K is less than N.

All times are in seconds, and rates in requests a second. Functions raise `Unstable` if more requests arrive than can be
served.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

# The tail of the wait is computed exactly up to this many service times. Beyond that, it is exponential to all digits.
_EXACT_SERVICES: Final = 400

Floats = npt.NDArray[np.float64]


class Unstable(ValueError):
    """Requests arrive faster than they are served, so the queue grows without end."""


class Times(msgspec.Struct, frozen=True):
    """The statistics of one quantity, in seconds."""

    mean: float
    p90: float
    p99: float


class Queue(msgspec.Struct, frozen=True):
    """The waits of prompts that arrive at random at a prefill engine. `utilisation`: the share of time for which the
    engine's first stage works."""

    utilisation: float
    wait_s: Times
    ttft_s: Times


def utilisation(rate: float, service_s: float) -> float:
    """Return the share of time for which a server works, which is below 1. Raises `Unstable`."""
    load = rate * service_s
    if load >= 1:
        raise Unstable(
            f"{rate:g} requests/s of {service_s:g} s each keep a server {load:.0%} busy: "
            f"expected less than {1 / service_s:g} requests/s"
        )
    return load


def mean_wait(rate: float, service_s: float, service_cv: float = 0.0) -> float:
    """Return the mean wait of M/G/1, by Pollaczek and Khinchine: R E[S^2] / (2 (1 - R E[S])).

    An arrival finds the server busy with probability rho = R E[S]. It then waits for the rest of that service. The mean
    of this rest is E[S^2] / (2 E[S]), because long services are met more often. It also waits for the prompts ahead of
    it; their mean number is R W by Little's law. So W = rho E[S^2] / (2 E[S]) + R W E[S], which gives the formula.

    service_cv: the coefficient of variation of the service time (standard deviation / mean). It is 0 if all times are
    equal (M/D/1), and 1 for exponential times (M/M/1).
    """
    load = utilisation(rate, service_s)
    return load * service_s * (1 + service_cv**2) / (2 * (1 - load))


def wait_within(rate: float, service_s: float, wait_s: float) -> float:
    """Return the probability that an arrival at M/D/1 waits at most `wait_s` (Crommelin's distribution).

    Crommelin (1932) gave it as an alternating sum, (1 - rho) sum_k (-rho (t - k))^k / k! e^(rho (t - k)), with t in
    service times. That sum loses all its digits at large t. The sum here has no negative terms (Franx, Operations
    Research Letters 29, 2001). Choose k with (k - 1) D <= t < k D, and look at the instant u = k D - t before the
    arrival. Suppose that at most k - 1 - j prompts wait in the queue at that instant, and that j prompts arrive in the
    u seconds after it. Then at most k - 1 prompts are ahead of the arrival. So its turn comes at the latest k services
    after the instant, which is t after its arrival. Hence P(W <= t) = sum_j Q(k - 1 - j) e^(-R u) (R u)^j / j!, where
    Q(m) is the probability that at most m wait.
    """
    load = utilisation(rate, service_s)
    if wait_s < 0:
        return 0.0
    services = wait_s / service_s
    if services >= _EXACT_SERVICES:
        decay = _decay(load)
        last = _EXACT_SERVICES - 0.5
        return 1 - (1 - wait_within(load, 1.0, last)) * math.exp(-decay * (services - last))
    whole = math.floor(services) + 1
    queued = np.cumsum(_waiting(load, whole))
    arrived = _poisson(load * (whole - services), whole)
    return min(1.0, float(np.dot(queued[::-1], arrived)))


def wait_percentile(rate: float, service_s: float, percentile: float) -> float:
    """Return the wait that `percentile` percent of the arrivals at M/D/1 do not exceed. It is 0 if this share does not
    wait at all."""
    share = percentile / 100
    load = utilisation(rate, service_s)
    if wait_within(load, 1.0, 0.0) >= share:
        return 0.0
    low, high = 0.0, 1.0
    while wait_within(load, 1.0, high) < share:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if wait_within(load, 1.0, middle) < share else (low, middle)
    return high * service_s


def one_device(service_s: float, rate: float) -> Queue:
    """Return the queue of one device. The mean TTFT is D + R D^2 / (2 (1 - R D))."""
    return _queue(service_s, service_s, rate)


def inter_op(service_s: float, rate: float, stages: int) -> Queue:
    """Return the queue of a pipeline of N stages. The first stage is an M/D/1 queue with service time D/N. Prompts
    never wait at later stages, because all stages take equally long. The mean TTFT is D + R D^2 / (2 N (N - R D)), and
    with two stages D + R D^2 / (4 (2 - R D))."""
    return _queue(service_s / stages, service_s, rate)


def intra_op(service_s: float, rate: float, speedup: float) -> Queue:
    """Return the queue of devices that share every prompt and are K times as fast together. The mean TTFT is D/K + R
    D^2 / (2 K (K - R D))."""
    return _queue(service_s / speedup, service_s / speedup, rate)


def crossover(speedup: float, devices: int = 2) -> float:
    """Return the load R D at which the means of `intra_op` with this speed-up and of `inter_op` on as many devices are
    equal. Below this load intra-op is faster. Above it inter-op is faster, because its queue is shorter.

    Raises `ValueError` unless 1 < speedup < devices, because otherwise one of them is faster at every load.
    """
    if not 1 < speedup < devices:
        raise ValueError(f"speed-up {speedup:g} of {devices} devices: expected more than 1 and less than {devices}")
    low, high = 0.0, float(speedup)  # above K, intra-op has no steady state
    while high - low > 1e-12:
        load = (low + high) / 2
        faster = 1 / speedup + mean_wait(load, 1 / speedup) < 1 + mean_wait(load, 1 / devices)
        low, high = (load, high) if faster else (low, load)
    return high


def highest_load(ttft_services: float, percentile: float) -> float:
    """Return the highest utilisation at which `percentile` percent of the prompts at one device have their first token
    within `ttft_services` service times. Means do not show this: when the mean is 2 service times, the P90 is 3.7."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        load = (low + high) / 2
        held = 1 + wait_percentile(load, 1.0, percentile) <= ttft_services
        low, high = (load, high) if held else (low, load)
    return low


# ---- M/D/1, in units of one service -----------------------------------------------------------------------------


def _queue(occupied_s: float, latency_s: float, rate: float) -> Queue:
    """Return the queue of a server that each prompt occupies for `occupied_s`, and leaves after `latency_s`."""
    waits = Times(
        mean_wait(rate, occupied_s),
        wait_percentile(rate, occupied_s, 90),
        wait_percentile(rate, occupied_s, 99),
    )
    ttft = Times(latency_s + waits.mean, latency_s + waits.p90, latency_s + waits.p99)
    return Queue(utilisation(rate, occupied_s), waits, ttft)


def _poisson(mean: float, count: int) -> Floats:
    """Return the probabilities of 0 … count - 1 events."""
    terms = np.empty(count)
    terms[0] = 1.0
    np.divide(mean, np.arange(1, count), out=terms[1:])
    return np.asarray(np.cumprod(terms) * math.exp(-mean), dtype=np.float64)


def _waiting(load: float, count: int) -> Floats:
    """Return the probabilities that 0 … count - 1 prompts wait in the queue, not counting the prompt in service.

    The number of prompts present has the distribution p of the chain embedded at departures. Ramaswami's recursion
    (Stochastic Models 4, 1988) computes p without subtractions: p(n) = (p(0) A(n - 1) + sum_{0<j<n} p(j) A(n - j)) /
    a(0). Here A(k) is the probability of more than k arrivals in a service.
    """
    arrivals = _poisson(load, count + 2)
    more = np.maximum(0.0, 1 - np.cumsum(arrivals))
    present = np.zeros(count + 1)
    present[0] = 1 - load
    for n in range(1, count + 1):
        present[n] = (present[0] * more[n - 1] + np.dot(present[1:n], more[1:n][::-1])) / arrivals[0]
    return np.concatenate([[present[0] + present[1]], present[2:]])


def _decay(load: float) -> float:
    """Return the rate at which the tail of the wait falls with each service time. It is the positive root of load (e^x
    - 1) = x."""
    low, high = 0.0, 2 * (1 / load - 1) + 1
    while load * math.expm1(high) < high:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if load * math.expm1(middle) < middle else (low, middle)
    return high
