/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Choosing an id from a row of logits in host memory. Plain C: nothing here knows of Python or of a device. */
#ifndef SAMPLING_H
#define SAMPLING_H

#include <stdint.h>

/* How ids are chosen: temperature 0 takes the largest logit, the lowest id of equal ones; else an id is drawn from the
 * softmax of logits / temperature over the top_k largest (0: over all). */
typedef struct sampling {
    double temperature;
    int64_t top_k;
} sampling;

typedef struct candidate {
    float logit;
    int64_t id;
} candidate;

/* A generator's state for number `index` of `seed`: each sequence draws from its own, whatever its neighbours do. */
uint64_t rng_state(uint64_t seed, uint64_t index);

/* The next number, in [0, 1). */
double rng_uniform(uint64_t *state);

/* Candidates that sample_row needs room for. */
int64_t sampling_room(const sampling *how, int64_t columns);

/* The chosen id, or -1 when the row holds a NaN or plus infinity. `dtype` is GPURT_FLOAT32 or the like. */
int64_t sample_row(const void *row, int32_t dtype, int64_t columns, const sampling *how, uint64_t *rng,
                   candidate *room);

#endif
