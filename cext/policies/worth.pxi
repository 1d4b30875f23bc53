# What blocks are worth, computed from the counts of reuse.pxi, and the ranking of the lists of blocks.
#
# The worth of a block is its Gittins index (Gittins, 1979): the most hits per reference that it can bring from its age
# on. The maximum is taken over all times for which the block might be kept. For caches see LHD (Beckmann, Chen, Cidon;
# NSDI 2018), which has one fixed horizon. The formula:
#     worth(class, a) = max over b >= a of  expected hits from bin a to b / expected references spent in them
# Bins with few samples borrow from others. A bin of all classes together borrows from the bin before it. A bin of one
# class borrows from the class with fewer uses, or else from all classes. The borrowed value is multiplied by the factor
# by which the class was used more often than its source so far (proportional hazards). While a class has few samples,
# it is worth at least as much as a class with fewer uses. Many samples show its own worth. So blocks may be worth less
# the more they were used, such as documents that are queried about ten times.


cdef enum:
    TAKEN_BEFORE_HALVING = 0x40000  # after this many samples all counts are halved

cdef double STRENGTH = 1.0              # an assumption counts as much as this many observed reuses
cdef double FIRST_HAZARD = 0.02         # assumed for the first bin
cdef double SECOND_HAZARD = 0.33        # assumed for the second bin, relative to the first: the second is 0.41 as wide,
                                        # so the newest blocks are worth most
cdef double MOST_ERRORS = 2.0           # in standard errors
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
    """Ranks the lists of blocks by the worth of their blocks. This takes 25 us.

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
            # A block is assumed to be worth at least as much as a block that was used less, and as the blocks behind it
            # in its chain. This raises its worth by at most two standard errors, so observations can show the contrary.
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
