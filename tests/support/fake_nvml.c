/* A driver library for tests: what real pynvml loads as libnvidia-ml.so.1 where there is no GPU.
 *
 * The state of its GPUs is the text file named by FAKE_NVML_STATE: lines `GPU.KEY VALUE`, where GPU is a number
 * or `*`, and a later line wins. A file that was replaced is read again at the next call, so a test changes the
 * readings of a process that runs. `fail.FUNCTION N` makes a function answer the NVML error N. A reading
 * without a line is NOT_SUPPORTED, except that no errors have happened and no process runs.
 *
 * Build: gcc -shared -fPIC -O1 -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef unsigned int u32;
typedef unsigned long long u64;

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10 };
enum { MAX_GPUS = 32, MAX_LINES = 2048, KEY_BYTES = 72, VALUE_BYTES = 120, EVERY_GPU = -1 };

struct line { int gpu; char key[KEY_BYTES]; char value[VALUE_BYTES]; };
struct gpu { int index; };

static struct line lines[MAX_LINES];
static int line_count, is_up;
static struct stat read_as;
static struct gpu gpus[MAX_GPUS];
static u64 events_given[MAX_GPUS];

/* --- the state ---------------------------------------------------------------------------- */

static int refresh(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now) != 0) return 0;
    if (now.st_ino == read_as.st_ino && now.st_mtim.tv_nsec == read_as.st_mtim.tv_nsec
        && now.st_mtim.tv_sec == read_as.st_mtim.tv_sec) return 1;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    char text[256], gpu[16];
    line_count = 0;
    while (line_count < MAX_LINES && fgets(text, sizeof text, file)) {
        struct line *l = &lines[line_count];
        if (sscanf(text, "%15[^.].%71s %119[^\n]", gpu, l->key, l->value) != 3) continue;
        l->gpu = gpu[0] == '*' ? EVERY_GPU : atoi(gpu);
        line_count++;
    }
    fclose(file);
    read_as = now;
    return 1;
}

static const char *text_of(int gpu, const char *key) {
    for (int i = line_count - 1; i >= 0; i--)
        if ((lines[i].gpu == gpu || lines[i].gpu == EVERY_GPU) && !strcmp(lines[i].key, key))
            return lines[i].value;
    return NULL;
}

static double number_of(int gpu, const char *key, double otherwise) {
    const char *text = text_of(gpu, key);
    return text ? strtod(text, NULL) : otherwise;
}

static int count(void) { return (int)number_of(EVERY_GPU, "count", 0); }

static int may_call(int gpu, const char *function) {
    char key[KEY_BYTES];
    if (!is_up) return UNINITIALIZED;
    if (!refresh()) return DRIVER_NOT_LOADED;
    snprintf(key, sizeof key, "fail.%s", function);
    return (int)number_of(gpu, key, OK);
}

/* Answers NOT_SUPPORTED where the state has no such reading. */
static int reading(int gpu, const char *key, double *value) {
    const char *text = text_of(gpu, key);
    if (!text) return NOT_SUPPORTED;
    *value = strtod(text, NULL);
    return OK;
}

#define CHECK(gpu) do { int error_ = may_call((gpu), __func__); if (error_) return error_; } while (0)
#define READ(gpu, key, target) do { \
        double value_; \
        int missing_ = reading((gpu), (key), &value_); \
        if (missing_) return missing_; \
        *(target) = (__typeof__(*(target)))value_; \
    } while (0)

static int copy(const char *text, char *out, u32 size) {
    if (!text) return NOT_SUPPORTED;
    snprintf(out, size, "%s", text);
    return OK;
}

/* --- the library -------------------------------------------------------------------------- */

int nvmlInitWithFlags(u32 flags) {
    (void)flags;
    if (!refresh()) return DRIVER_NOT_LOADED;
    int error = (int)number_of(EVERY_GPU, "fail.nvmlInitWithFlags", OK);
    is_up = error == OK;
    if (is_up) memset(events_given, 0, sizeof events_given);
    return error;
}

int nvmlShutdown(void) { is_up = 0; return OK; }
const char *nvmlErrorString(int error) { static char text[32]; snprintf(text, sizeof text, "fake error %d", error); return text; }
int nvmlSystemGetDriverVersion(char *out, u32 size) { CHECK(EVERY_GPU); return copy(text_of(EVERY_GPU, "driver"), out, size); }

int nvmlDeviceGetCount_v2(u32 *n) { CHECK(EVERY_GPU); *n = (u32)count(); return OK; }

int nvmlDeviceGetHandleByIndex_v2(u32 index, struct gpu **handle) {
    if (index >= (u32)count() || index >= MAX_GPUS) return INVALID_ARGUMENT;
    CHECK((int)index);
    gpus[index].index = (int)index;
    *handle = &gpus[index];
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **handle) {
    for (int i = 0; i < count() && i < MAX_GPUS; i++)
        if (text_of(i, "uuid") && !strcmp(text_of(i, "uuid"), uuid))
            return nvmlDeviceGetHandleByIndex_v2((u32)i, handle);
    return 6;
}

int nvmlDeviceGetIndex(struct gpu *g, u32 *index) { CHECK(g->index); *index = (u32)g->index; return OK; }
int nvmlDeviceGetName(struct gpu *g, char *out, u32 size) { CHECK(g->index); return copy(text_of(g->index, "name"), out, size); }

int nvmlDeviceGetCudaComputeCapability(struct gpu *g, int *major, int *minor) {
    CHECK(g->index);
    READ(g->index, "capability_major", major);
    READ(g->index, "capability_minor", minor);
    return OK;
}

int nvmlDeviceGetUUID(struct gpu *g, char *out, u32 size) { CHECK(g->index); return copy(text_of(g->index, "uuid"), out, size); }

int nvmlDeviceGetMemoryInfo(struct gpu *g, u64 *memory) {
    CHECK(g->index);
    READ(g->index, "memory_total", &memory[0]);
    READ(g->index, "memory_used", &memory[2]);
    memory[1] = memory[0] - memory[2];
    return OK;
}

int nvmlDeviceGetUtilizationRates(struct gpu *g, u32 *rates) {
    CHECK(g->index);
    READ(g->index, "utilisation", &rates[0]);
    READ(g->index, "memory_busy", &rates[1]);
    return OK;
}

int nvmlDeviceGetTemperature(struct gpu *g, int sensor, u32 *value) { (void)sensor; CHECK(g->index); READ(g->index, "temperature", value); return OK; }
int nvmlDeviceGetPowerUsage(struct gpu *g, u32 *value) { CHECK(g->index); READ(g->index, "power_mw", value); return OK; }
int nvmlDeviceGetClockInfo(struct gpu *g, int kind, u32 *value) { CHECK(g->index); READ(g->index, kind == 2 ? "memory_clock" : "sm_clock", value); return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(struct gpu *g, u64 *value) { CHECK(g->index); READ(g->index, "throttle", value); return OK; }
int nvmlDeviceGetPcieThroughput(struct gpu *g, int counter, u32 *value) { CHECK(g->index); READ(g->index, counter ? "pcie_rx_kb" : "pcie_tx_kb", value); return OK; }

int nvmlDeviceGetTotalEccErrors(struct gpu *g, int kind, int counter, u64 *value) {
    (void)counter;
    CHECK(g->index);
    READ(g->index, kind ? "ecc_uncorrected" : "ecc_corrected", value);
    return OK;
}

/* --- processes ---------------------------------------------------------------------------- */

struct process { u32 pid; u64 memory; u32 gpu_instance, compute_instance; };

/* `processes` is `PID:BYTES PID:BYTES …`. */
int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *g, u32 *n, struct process *out) {
    CHECK(g->index);
    const char *text = text_of(g->index, "processes");
    u32 found = 0, room = *n, pid, used;
    u64 memory;
    int length;
    while (text && sscanf(text, " %u:%llu%n", &pid, &memory, &length) == 2) {
        used = found++;
        if (out && used < room) out[used] = (struct process){pid, memory, ~0u, ~0u};
        text += length;
    }
    *n = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

/* --- topology ----------------------------------------------------------------------------- */

struct pci { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(struct gpu *g, struct pci *out) {
    CHECK(g->index);
    memset(out, 0, sizeof *out);
    out->bus = (u32)g->index + 1;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return OK;
}

/* `nvlinks` is one word a link: the number of the GPU at its other end, `s` for a switch, `-` for inactive. */
static int other_end(int gpu, u32 link, char *out) {
    const char *text = text_of(gpu, "nvlinks");
    int length;
    if (!text) return NOT_SUPPORTED;
    for (u32 i = 0; sscanf(text, " %7s%n", out, &length) == 1; i++, text += length)
        if (i == link) return OK;
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(struct gpu *g, u32 link, u32 *active) {
    char end[8];
    CHECK(g->index);
    int error = other_end(g->index, link, end);
    if (!error) *active = end[0] != '-';
    return error;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(struct gpu *g, u32 link, u32 *kind) {
    char end[8];
    CHECK(g->index);
    int error = other_end(g->index, link, end);
    if (!error) *kind = end[0] == 's' ? 2 : 0;
    return error;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct gpu *g, u32 link, struct pci *out) {
    char end[8];
    CHECK(g->index);
    int error = other_end(g->index, link, end);
    if (error) return error;
    if (end[0] < '0' || end[0] > '9') return NOT_SUPPORTED;
    return nvmlDeviceGetPciInfo_v3(&gpus[atoi(end)], out);
}

/* `ancestors` is one NVML topology level for each GPU of the node. */
int nvmlDeviceGetTopologyCommonAncestor(struct gpu *a, struct gpu *b, int *level) {
    CHECK(a->index);
    const char *text = text_of(a->index, "ancestors");
    int length;
    for (int i = 0; text && sscanf(text, " %d%n", level, &length) == 1; i++, text += length)
        if (i == b->index) return OK;
    return NOT_SUPPORTED;
}

/* --- counters by number ------------------------------------------------------------------- */

struct field { u32 id, scope; long long timestamp, latency; int type, error; union { double d; u32 u; u64 l; } value; };

int nvmlDeviceGetFieldValues(struct gpu *g, int n, struct field *fields) {
    CHECK(g->index);
    for (int i = 0; i < n; i++) {
        char key[KEY_BYTES];
        double value = 0;
        snprintf(key, sizeof key, "field.%u", fields[i].id);
        fields[i].error = fields[i].scope == ~0u ? reading(g->index, key, &value) : INVALID_ARGUMENT;
        fields[i].type = 3;
        fields[i].value.l = (u64)value;
    }
    return OK;
}

struct metric { u32 id; int error; double value; const char *short_name, *long_name, *unit; };
struct metrics { u32 version, n; int *first, *second; struct metric of[]; };

int nvmlGpmQueryDeviceSupport(struct gpu *g, u32 *support) { CHECK(g->index); support[1] = text_of(g->index, "gpm") != NULL; return OK; }
int nvmlGpmSampleAlloc(int **sample) { *sample = calloc(1, sizeof **sample); return OK; }
int nvmlGpmSampleFree(int *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(struct gpu *g, int *sample) { CHECK(g->index); *sample = g->index; return OK; }

int nvmlGpmMetricsGet(struct metrics *asked) {
    int gpu = *asked->second;
    CHECK(gpu);
    for (u32 i = 0; i < asked->n; i++) {
        char key[KEY_BYTES];
        snprintf(key, sizeof key, "gpm.%u", asked->of[i].id);
        asked->of[i].error = reading(gpu, key, &asked->of[i].value);
    }
    return OK;
}

/* --- events ------------------------------------------------------------------------------- */

struct event { struct gpu *gpu; u64 type, data; u32 gpu_instance, compute_instance; };

int nvmlEventSetCreate(void **set) { CHECK(EVERY_GPU); *set = gpus; return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceGetSupportedEventTypes(struct gpu *g, u64 *types) { CHECK(g->index); *types = 8; return OK; }
int nvmlDeviceRegisterEvents(struct gpu *g, u64 types, void *set) { (void)types; (void)set; CHECK(g->index); return OK; }

/* `xids` lists every Xid that a GPU has had; each is given once. */
int nvmlEventSetWait_v2(void *set, struct event *out, u32 timeout_ms) {
    (void)set; (void)timeout_ms;
    CHECK(EVERY_GPU);
    for (int i = 0; i < count() && i < MAX_GPUS; i++) {
        const char *text = text_of(i, "xids");
        u64 xid, nth = 0;
        int length;
        for (; text && sscanf(text, " %llu%n", &xid, &length) == 1; nth++, text += length)
            if (nth == events_given[i]) {
                events_given[i]++;
                *out = (struct event){&gpus[i], 8, xid, ~0u, ~0u};
                return OK;
            }
    }
    return TIMEOUT;
}
