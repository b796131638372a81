/* Runs the kernels on a CPU: the threads of a block as fibers, in turn, one block after another.
 * A block whose threads wait for different barriers never ends on a GPU; here it is an error. */
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include "../planes/planes.cuh"
#include "../rans/rans.cuh"

shim_index threadIdx, blockIdx, blockDim;

namespace {

const uint32_t THREADS_MAX = 1024, STACK_BYTES = 256 << 10;

struct fiber {
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    int done;
};
struct warp {
    uint32_t arrived, generation, ballot, values[32], votes[32], shared[32];
};

fiber fibers[THREADS_MAX];
warp warps[THREADS_MAX / 32];
uint32_t block_arrived, block_generation, current, progress;
#if defined(__x86_64__)
void *scheduler_pointer;
#else
ucontext_t scheduler_context;
#endif
uint8_t *stacks;
void (*kernel)(const void *);
const void *argument;

#if defined(__x86_64__)
/* Saves what the C calling convention asks a function to keep, and changes stacks: a hundred
 * times cheaper than swapcontext, which asks the kernel about signals. */
asm(".text\n.type shim_switch,@function\nshim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size shim_switch,.-shim_switch\n");
extern "C" void shim_switch(void **from, void *to);
#endif

void to_scheduler() {
#if defined(__x86_64__)
    shim_switch(&fibers[current].stack_pointer, scheduler_pointer);
#else
    swapcontext(&fibers[current].context, &scheduler_context);
#endif
}

void run_fiber() {
    kernel(argument);
    fibers[current].done = 1;
    progress = 1;
    for (;;)
        to_scheduler();
}

void start(uint32_t thread) {
    fiber &f = fibers[thread];
    uint8_t *stack = stacks + (size_t)thread * STACK_BYTES;
    f.done = 0;
#if defined(__x86_64__)
    void **top = (void **)(stack + STACK_BYTES) - 2; /* a return address away from 16 bytes */
    *top = (void *)run_fiber;
    f.stack_pointer = top - 6;
    memset(f.stack_pointer, 0, 6 * sizeof(void *));
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stack;
    f.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f.context, run_fiber, 0);
#endif
}

void resume(uint32_t thread) {
    current = thread;
    threadIdx.x = thread;
#if defined(__x86_64__)
    shim_switch(&scheduler_pointer, fibers[thread].stack_pointer);
#else
    swapcontext(&scheduler_context, &fibers[thread].context);
#endif
}

/* Wait until every thread of the group has come here; the last one runs `settle`. */
template <class Settle>
void meet(uint32_t *arrived, uint32_t *generation, uint32_t members, Settle settle) {
    uint32_t mine = *generation;
    if (++*arrived == members) {
        settle();
        *arrived = 0;
        ++*generation;
        progress = 1;
        return;
    }
    uint32_t thread = current;
    while (*generation == mine)
        to_scheduler();
    threadIdx.x = thread;
}

} // namespace

void __syncthreads() {
    meet(&block_arrived, &block_generation, blockDim.x, [] {});
}

uint32_t __ballot_sync(uint32_t, int vote) {
    warp &w = warps[current / 32];
    w.votes[current % 32] = vote != 0;
    meet(&w.arrived, &w.generation, 32, [&w] {
        w.ballot = 0;
        for (int lane = 0; lane < 32; lane++)
            w.ballot |= w.votes[lane] << lane;
    });
    return w.ballot;
}

static warp &exchange(uint32_t value) {
    warp &w = warps[current / 32];
    w.values[current % 32] = value;
    meet(&w.arrived, &w.generation, 32, [&w] { memcpy(w.shared, w.values, sizeof w.shared); });
    return w;
}

uint32_t __shfl_up_sync(uint32_t, uint32_t value, uint32_t by) {
    uint32_t lane = current % 32;
    warp &w = exchange(value);
    return lane >= by ? w.shared[lane - by] : value;
}

uint32_t __shfl_sync(uint32_t, uint32_t value, int from) { return exchange(value).shared[from]; }

/* Run one kernel over a grid; 0, or -1 for a name or size that is not there. */
extern "C" int torpor_shim_launch(const char *name, uint32_t grid_x, uint32_t grid_y,
                                  uint32_t threads, const void *jobs) {
    static const struct {
        const char *name;
        void (*run)(const void *);
    } known[] = {
#define KERNEL(kernel, job) {#kernel, [](const void *j) { kernel((const job *)j); }}
        KERNEL(planes_split, planes_job),   KERNEL(planes_join, planes_job),
        KERNEL(rans_tables, rans_encode_job), KERNEL(rans_segments, rans_encode_job),
        KERNEL(rans_measure, rans_encode_job), KERNEL(rans_pack, rans_encode_job),
        KERNEL(rans_check, rans_decode_job), KERNEL(rans_decode, rans_decode_job),
    };
    kernel = 0;
    for (const auto &one : known)
        if (!strcmp(one.name, name))
            kernel = one.run;
    if (!kernel || !threads || threads > THREADS_MAX || threads % 32)
        return -1;
    if (!stacks)
        stacks = (uint8_t *)mmap(0, (size_t)THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    argument = jobs;
    blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) {
            for (uint32_t t = 0; t < threads; t++)
                start(t);
            for (uint32_t left = threads; left;) {
                progress = 0;
                left = 0;
                for (uint32_t t = 0; t < threads; t++)
                    if (!fibers[t].done) {
                        resume(t);
                        left += !fibers[t].done;
                    }
                if (left && !progress) {
                    fprintf(stderr, "kernel %s: its threads wait for different barriers\n", name);
                    abort();
                }
            }
        }
    return 0;
}
