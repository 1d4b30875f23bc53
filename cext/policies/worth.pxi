# What blocks are worth, from the counts of reuse.pxi: the ranking of the lists of blocks.
#
# The worth of a block is its Gittins index: the most hits a reference that it can bring from its age on, over all times
# for which it might be kept (Gittins, 1979; for caches Beckmann, Chen, Cidon: LHD, NSDI 2018, with one fixed horizon).
#     worth(class, a) = max over b >= a of  expected hits from bin a to b / expected references spent in them
# Bins with few samples borrow from others: a bin of all classes from the bin before it; a bin of one class from the
# class with fewer uses, or else from all classes, times the factor by which the class was used more or less than these
# so far (proportional hazards). Few samples also make a class be worth as much as one with fewer uses; many show what
# it is worth. So blocks may be worth less the more they were used, as documents that are asked about some ten times.


cdef enum:
    TAKEN_BEFORE_HALVING = 0x40000  # after so many samples, all counts are halved

cdef double STRENGTH = 1.0              # an assumption counts as this many observed reuses
cdef double FIRST_HAZARD = 0.02         # assumed for the first bin
cdef double SECOND_HAZARD = 0.33        # assumed for the second bin, relative to the first: the second is 0.41 as wide,
                                        # so the newest blocks are worth most
cdef double MOST_ERRORS = 2.0           # standard errors
cdef double MOST_HAZARD = 0.98
cdef double MOST_ASSUMED = 0.95


cdef struct Ranked:
    double worth
    int32_t list


cdef int compare_ranked(const void *a, const void *b) noexcept nogil:
    cdef const Ranked *x = <const Ranked *>a
    cdef const Ranked *y = <const Ranked *>b
    if x.worth != y.worth:
        return -1 if x.worth < y.worth else 1
    return x.list - y.list


cdef void rank_lists(Reuse reuse, double mean_request) noexcept nogil:
    """Ranks the lists of blocks by the worth of their blocks. Takes 25 us.

    The blocks of one request are used together, so all of them count as one observation.
    """
    cdef double together = max(1.0, mean_request / reuse.rate), strength = STRENGTH * together
    cdef double[BINS] pool
    cdef double[BINS] hazard
    cdef double[BINS] prior
    cdef Ranked[LISTS] ranked
    cdef double before = FIRST_HAZARD, entered, reused, assumed, alive, hits, cost, best, factor, found, observed
    cdef double most
    cdef int kind, bin, first, step
    if reuse.taken >= TAKEN_BEFORE_HALVING:
        reuse.taken = 1
        for kind in range(CLASSES):
            for bin in range(BINS):
                reuse.entered[kind][bin] /= 2
                reuse.reused[kind][bin] /= 2
    for bin in range(BINS):
        entered = reused = strength / 4
        entered /= max(before, 0.001)
        for kind in range(CLASSES):
            entered += reuse.entered[kind][bin]
            reused += reuse.reused[kind][bin]
        pool[bin] = min(MOST_ASSUMED, reused / entered)
        before = pool[bin] * SECOND_HAZARD if bin == 0 else pool[bin]
    for step in range(CLASSES):
        kind = 0 if step == 0 else step + 14 if step <= 3 else step - 3  # 0, 15, 16, 17, 1 to 14
        reused = entered = strength
        for bin in range(BINS):
            prior[bin] = hazard[bin] if 1 < kind < 15 else pool[bin]
            reused += reuse.reused[kind][bin]
            entered += reuse.entered[kind][bin] * prior[bin]
        factor = reused / entered
        for bin in range(BINS):
            assumed = min(MOST_ASSUMED, prior[bin] * factor)
            hazard[bin] = min(
                MOST_HAZARD,
                (reuse.reused[kind][bin] + strength) / (reuse.entered[kind][bin] + strength / assumed),
            )
        for first in range(BINS):
            alive = 1.0
            hits = cost = best = found = observed = 0.0
            for bin in range(first, BINS):
                cost += (reuse.edges[bin + 1] - reuse.edges[bin]) * alive * (1 - 0.5 * hazard[bin])
                hits += alive * hazard[bin]
                alive *= 1 - hazard[bin]
                found += reuse.reused[kind][bin]
                if hits > best * cost:
                    best = hits / cost
                    observed = found
            # Presumably a block is worth at least as much as one that was used less, and as the blocks behind it in
            # its chain. What was observed may show the contrary: up to two standard errors are allowed for.
            most = best * (1 + MOST_ERRORS / sqrt(1 + observed / together))
            if 0 < kind < 15:
                best = max(best, min(most, ranked[(kind - 1) * BINS + first].worth))
            elif kind >= 15:
                best = max(best, min(most, ranked[first].worth))
            if kind == 2 or kind == 4 or kind == 8:
                best = max(
                    best, min(most, ranked[(15 if kind == 2 else 16 if kind == 4 else 17) * BINS + first].worth)
                )
            ranked[kind * BINS + first].worth = best
            ranked[kind * BINS + first].list = kind * BINS + first
    qsort(ranked, LISTS, sizeof(Ranked), compare_ranked)
    for bin in range(LISTS):
        reuse.order[bin] = ranked[bin].list
