// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs until the host has stored something other than 0 in flag[0], which is page-locked memory, or for ten seconds;
// then seen[0] is what it found there. One thread.

extern "C" __global__ void hold_f32(const int* flag, int* seen) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    int found;
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        found = *reinterpret_cast<const volatile int*>(flag);
    } while (found == 0 && now - begin < 10000000000ULL);
    seen[0] = found;
}
