/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "sampling.h"

#include <gpu_runtime/abi.h>

#include <math.h>
#include <string.h>

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_float16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 1023u;
    if (exponent == 31)
        return from_bits(sign | 0x7F800000u | fraction << 13);
    if (exponent)
        return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    return (sign ? -1.0f : 1.0f) * (float)fraction / 16777216.0f; /* subnormal, or zero */
}

/* Element j of a row as float32. */
static float element(const void *row, int32_t dtype, int64_t j)
{
    if (dtype == GPURT_FLOAT32)
        return ((const float *)row)[j];
    if (dtype == GPURT_BFLOAT16)
        return from_bits((uint32_t)((const uint16_t *)row)[j] << 16);
    return from_float16(((const uint16_t *)row)[j]);
}

uint64_t rng_state(uint64_t seed, uint64_t index) { return seed * UINT64_C(0xD1342543DE82EF95) + index; }

double rng_uniform(uint64_t *state) /* SplitMix64 */
{
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

int64_t sampling_room(const sampling *how, int64_t columns)
{
    if (how->temperature == 0)
        return 1;
    return how->top_k > 0 && how->top_k < columns ? how->top_k : columns;
}

/* Keep the `most` largest logits, largest first and of equal ones the lowest id; with room for all, in the ids' order.
 * Returns how many there are, -1 when one is a NaN or plus infinity. */
static int64_t best(const void *row, int32_t dtype, int64_t columns, candidate *room, int64_t most)
{
    int64_t count = 0, j, place;
    for (j = 0; j < columns; ++j) {
        float logit = element(row, dtype, j);
        if (!(logit < INFINITY))
            return -1;
        if (most < columns) {
            if (count == most && logit <= room[count - 1].logit)
                continue;
            place = count < most ? count++ : count - 1;
            for (; place > 0 && room[place - 1].logit < logit; --place)
                room[place] = room[place - 1];
        } else {
            place = count++;
        }
        room[place].logit = logit;
        room[place].id = j;
    }
    return count;
}

int64_t sample_row(const void *row, int32_t dtype, int64_t columns, const sampling *how, uint64_t *rng,
                   candidate *room)
{
    int64_t count = best(row, dtype, columns, room, sampling_room(how, columns)), i;
    float largest = -INFINITY;
    double total = 0, left;
    if (count < 1)
        return -1;
    if (how->temperature == 0)
        return room[0].id;
    for (i = 0; i < count; ++i)
        if (room[i].logit > largest)
            largest = room[i].logit;
    for (i = 0; i < count; ++i)
        total += exp(((double)room[i].logit - largest) / how->temperature);
    left = rng_uniform(rng) * total;
    for (i = 0; i < count - 1; ++i) {
        left -= exp(((double)room[i].logit - largest) / how->temperature);
        if (left < 0)
            break;
    }
    return room[i].id;
}
