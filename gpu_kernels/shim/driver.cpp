/* A CUDA driver for tests: the functions that gpu_kernels/driver.py calls, over the shim.
 *
 * As strict as a real one, or stricter: work is only queued when it is given, and done when the
 * stream is asked about, piece by piece; so what the host touches too early is not there yet, or
 * spoils what comes. Fresh memory is filled with rubbish. Copies must lie in memory that this
 * driver gave, host memory must be pinned, each thread must have made the context current, and
 * after a fault of a kernel every call says so, as a real context does. One lock serves all.
 * Events are stamped in the order of their stream, by a clock that the work moves on, and no other.
 *
 * Tests set it up by the functions at the end. A module's image is the text "shim ROOM".
 */
#include "shim.cpp"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace {

enum result {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
    NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719,
};
const int ABORT = -1; /* of torpor_shim_fail: the driver takes the process down */

struct stream {
    std::deque<std::function<int()>> work;
};
struct module {
    std::string room;
};
struct event {
    bool recorded, done;
    int64_t at_ns;
};
struct failure {
    std::string function;
    int nth, times, result;
};

std::mutex lock;
std::map<uint8_t *, size_t> device_memory, pinned_memory;
std::set<stream *> streams;
std::set<module *> modules;
std::map<event *, std::shared_ptr<event>> events; /* work on a stream may outlive the handle */
std::set<std::string> kernels; /* a function's handle is the address of its name */
std::map<std::string, int> calls;
failure planned;
uint64_t free_bytes;
int devices, initialised, retained, fault;
uintptr_t context = 1; /* the handle of the primary context; another one after each release */
thread_local uintptr_t entered;
int64_t now_ns; /* a byte that is copied, a thread that is started: a nanosecond each */

int begin(const char *function, bool in_context) {
    calls[function]++;
    if (planned.times && planned.function == function && --planned.nth < 0) {
        planned.times--;
        if (planned.result == ABORT)
            abort();
        if (planned.result >= ILLEGAL_ADDRESS)
            fault = planned.result;
        return planned.result;
    }
    if (!initialised)
        return NOT_INITIALIZED;
    if (in_context && (!retained || entered != context))
        return INVALID_CONTEXT;
    return in_context ? fault : SUCCESS;
}

bool holds(const std::map<uint8_t *, size_t> &memory, const uint8_t *at, size_t size) {
    auto next = memory.upper_bound((uint8_t *)at);
    if (next == memory.begin())
        return false;
    --next;
    return at + size <= next->first + next->second;
}

int take(std::map<uint8_t *, size_t> &memory, size_t size, uint8_t rubbish, uint8_t **at) {
    if (!size)
        return INVALID_VALUE;
    if (posix_memalign((void **)at, 256, size))
        return OUT_OF_MEMORY;
    memset(*at, rubbish, size);
    memory[*at] = size;
    return SUCCESS;
}

int do_one(stream *of) {
    std::function<int()> next = of->work.front();
    of->work.pop_front();
    if (!fault)
        fault = next();
    return fault;
}

/* Giving memory back waits for all work, as the real driver does. */
int give_back(std::map<uint8_t *, size_t> &memory, uint8_t *at) {
    for (stream *one : streams)
        while (!one->work.empty())
            do_one(one);
    if (!memory.erase(at))
        return INVALID_VALUE;
    free(at);
    return SUCCESS;
}

void put_copy(void *on, void *to, const void *from, size_t size) {
    ((stream *)on)->work.push_back([=] {
        now_ns += (int64_t)size;
        memcpy(to, from, size);
        return (int)SUCCESS;
    });
}

void drop_everything() {
    for (auto &one : device_memory)
        free(one.first);
    for (auto &one : pinned_memory)
        free(one.first);
    for (stream *one : streams)
        delete one;
    for (module *one : modules)
        delete one;
    device_memory.clear();
    pinned_memory.clear();
    streams.clear();
    modules.clear();
    events.clear();
    retained = fault = 0;
    context++;
}

} // namespace

#define BEGIN(in_context)                                                                         \
    std::lock_guard<std::mutex> guard(lock);                                                       \
    if (int failed = begin(__func__, in_context))                                                  \
        return failed;
#define NEED(condition, otherwise)                                                                \
    if (!(condition))                                                                              \
        return otherwise;

extern "C" {

int cuInit(unsigned flags) {
    std::lock_guard<std::mutex> guard(lock);
    int failed = begin(__func__, false);
    NEED(!failed || failed == NOT_INITIALIZED, failed)
    NEED(!flags, INVALID_VALUE)
    NEED(devices, NO_DEVICE)
    initialised = 1;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    BEGIN(false)
    *count = devices;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    BEGIN(false)
    NEED(ordinal >= 0 && ordinal < devices, INVALID_DEVICE)
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device) {
    BEGIN(false)
    NEED(device >= 0 && device < devices, INVALID_DEVICE)
    snprintf(name, (size_t)size, "CPU shim");
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **to, int device) {
    BEGIN(false)
    NEED(device >= 0 && device < devices, INVALID_DEVICE)
    retained++;
    *to = (void *)context;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN(false)
    NEED(device >= 0 && device < devices, INVALID_DEVICE)
    NEED(retained, INVALID_CONTEXT)
    if (!--retained)
        drop_everything();
    return SUCCESS;
}

int cuCtxSetCurrent(void *to) {
    BEGIN(false)
    NEED(!to || (retained && (uintptr_t)to == context), INVALID_CONTEXT)
    entered = (uintptr_t)to;
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t *free_now, size_t *total) {
    BEGIN(true)
    *free_now = free_bytes;
    *total = free_bytes;
    return SUCCESS;
}

int cuModuleLoadData(void **to, const void *image) {
    BEGIN(true)
    NEED(!strncmp((const char *)image, "shim ", 5), INVALID_IMAGE)
    module *made = new module{(const char *)image + 5};
    modules.insert(made);
    *to = made;
    return SUCCESS;
}

int cuModuleUnload(void *unloaded) {
    BEGIN(true)
    NEED(modules.erase((module *)unloaded), INVALID_HANDLE)
    delete (module *)unloaded;
    return SUCCESS;
}

int cuModuleGetFunction(void **to, void *of, const char *name) {
    BEGIN(true)
    NEED(modules.count((module *)of), INVALID_HANDLE)
    std::string room = ((module *)of)->room + "_";
    NEED(!strncmp(name, room.c_str(), room.size()), NOT_FOUND)
    *to = (void *)&*kernels.insert(name).first;
    return SUCCESS;
}

int cuMemAlloc_v2(unsigned long long *to, size_t size) {
    BEGIN(true)
    NEED(size <= free_bytes, OUT_OF_MEMORY)
    uint8_t *at = 0;
    int failed = take(device_memory, size, 0xa5, &at);
    NEED(!failed, failed)
    free_bytes -= size;
    *to = (unsigned long long)at;
    return SUCCESS;
}

int cuMemFree_v2(unsigned long long at) {
    BEGIN(true)
    auto found = device_memory.find((uint8_t *)at);
    free_bytes += found == device_memory.end() ? 0 : found->second;
    return give_back(device_memory, (uint8_t *)at);
}

int cuMemHostAlloc(void **to, size_t size, unsigned flags) {
    BEGIN(true)
    NEED(!flags, INVALID_VALUE)
    return take(pinned_memory, size, 0x5a, (uint8_t **)to);
}

int cuMemFreeHost(void *at) {
    BEGIN(true)
    return give_back(pinned_memory, (uint8_t *)at);
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *on) {
    BEGIN(true)
    NEED(streams.count((stream *)on), INVALID_HANDLE)
    NEED(holds(device_memory, (uint8_t *)to, size), INVALID_VALUE)
    NEED(holds(pinned_memory, (const uint8_t *)from, size), INVALID_VALUE)
    put_copy(on, (void *)to, from, size);
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *on) {
    BEGIN(true)
    NEED(streams.count((stream *)on), INVALID_HANDLE)
    NEED(holds(device_memory, (uint8_t *)from, size), INVALID_VALUE)
    NEED(holds(pinned_memory, (uint8_t *)to, size), INVALID_VALUE)
    put_copy(on, to, (void *)from, size);
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t size, void *on) {
    BEGIN(true)
    NEED(streams.count((stream *)on), INVALID_HANDLE)
    NEED(holds(device_memory, (uint8_t *)from, size), INVALID_VALUE)
    NEED(holds(device_memory, (uint8_t *)to, size), INVALID_VALUE)
    NEED(to + size <= from || from + size <= to, INVALID_VALUE)
    put_copy(on, (void *)to, (void *)from, size);
    return SUCCESS;
}

int cuStreamCreate(void **to, unsigned flags) {
    BEGIN(true)
    NEED(flags <= 1, INVALID_VALUE)
    stream *made = new stream;
    streams.insert(made);
    *to = made;
    return SUCCESS;
}

int cuStreamQuery(void *of) {
    BEGIN(true)
    NEED(streams.count((stream *)of), INVALID_HANDLE)
    stream *asked = (stream *)of;
    NEED(!asked->work.empty(), SUCCESS)
    int failed = do_one(asked);
    NEED(!failed, failed)
    return asked->work.empty() ? SUCCESS : NOT_READY;
}

int cuStreamDestroy_v2(void *ended) {
    BEGIN(true)
    NEED(streams.erase((stream *)ended), INVALID_HANDLE)
    delete (stream *)ended;
    return SUCCESS;
}

int cuEventCreate(void **to, unsigned flags) {
    BEGIN(true)
    NEED(!flags, INVALID_VALUE)
    auto made = std::make_shared<event>(event{false, false, 0});
    events[made.get()] = made;
    *to = made.get();
    return SUCCESS;
}

int cuEventRecord(void *recorded, void *on) {
    BEGIN(true)
    auto found = events.find((event *)recorded);
    NEED(found != events.end() && streams.count((stream *)on), INVALID_HANDLE)
    std::shared_ptr<event> kept = found->second;
    kept->recorded = true;
    kept->done = false;
    ((stream *)on)->work.push_back([kept] {
        kept->at_ns = ++now_ns;
        kept->done = true;
        return (int)SUCCESS;
    });
    return SUCCESS;
}

int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    BEGIN(true)
    auto first = events.find((event *)from), last = events.find((event *)to);
    NEED(first != events.end() && last != events.end(), INVALID_HANDLE)
    NEED(first->second->recorded && last->second->recorded, INVALID_HANDLE)
    NEED(first->second->done && last->second->done, NOT_READY)
    *milliseconds = (float)((double)(last->second->at_ns - first->second->at_ns) / 1e6);
    return SUCCESS;
}

int cuEventDestroy_v2(void *ended) {
    BEGIN(true)
    NEED(events.erase((event *)ended), INVALID_HANDLE)
    return SUCCESS;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void *on, void **parameters, void **extra) {
    BEGIN(true)
    NEED(streams.count((stream *)on) && function, INVALID_HANDLE)
    NEED(grid_x && grid_y && grid_y < 65536 && grid_z == 1 && block_x && block_x <= 1024 &&
             block_y == 1 && block_z == 1 && !shared_bytes && parameters && !extra,
         INVALID_VALUE)
    const std::string *name = (const std::string *)function;
    uint64_t jobs = *(uint64_t *)parameters[0];
    ((stream *)on)->work.push_back([=] {
        if (!holds(device_memory, (uint8_t *)jobs, 1))
            return (int)ILLEGAL_ADDRESS;
        now_ns += (int64_t)grid_x * grid_y * block_x;
        int done = torpor_shim_launch(name->c_str(), grid_x, grid_y, block_x, (void *)jobs);
        return done ? (int)LAUNCH_FAILED : (int)SUCCESS;
    });
    return SUCCESS;
}

int cuGetErrorString(int error, const char **words) {
    static const std::map<int, const char *> known = {
        {OUT_OF_MEMORY, "out of memory"},          {NO_DEVICE, "no CUDA-capable device is detected"},
        {INVALID_VALUE, "invalid argument"},       {INVALID_CONTEXT, "invalid device context"},
        {LAUNCH_FAILED, "unspecified launch failure"}, {INVALID_IMAGE, "device kernel image is invalid"},
    };
    auto found = known.find(error);
    *words = found == known.end() ? 0 : found->second;
    return *words ? SUCCESS : INVALID_VALUE;
}

/* As just loaded, with one GPU of 80 GiB. Memory that is still held is lost to its holder. */
void torpor_shim_reset() {
    std::lock_guard<std::mutex> guard(lock);
    drop_everything();
    calls.clear();
    planned = failure{"", 0, 0, 0};
    free_bytes = (uint64_t)80 << 30;
    now_ns = 0;
    devices = 1;
    initialised = 0;
}

/* The calls of a function give `result`, from the nth one that comes on, so many times. */
void torpor_shim_fail(const char *function, int nth, int times, int result) {
    std::lock_guard<std::mutex> guard(lock);
    planned = failure{function, nth - 1, times, result};
}

void torpor_shim_devices(int count) { devices = count; }

void torpor_shim_free_bytes(uint64_t bytes) { free_bytes = bytes; }

int torpor_shim_calls(const char *function) {
    std::lock_guard<std::mutex> guard(lock);
    return calls[function];
}

/* Whatever was taken from this driver and not given back. */
int torpor_shim_held() {
    std::lock_guard<std::mutex> guard(lock);
    return (int)(device_memory.size() + pinned_memory.size() + streams.size() + modules.size() +
                 events.size()) +
           retained;
}

} /* extern "C" */
