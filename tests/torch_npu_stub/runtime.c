/* Devices, contexts, memory and versions. Device memory is host memory, counted per device and limited.
 *
 * ACL_STUB_DEVICES  number of devices (8)
 * ACL_STUB_MEMORY   bytes of memory of each device (4 GiB)
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stub.h"

#define MAX_DEVICES 64
#define ALIGNMENT 4096
#define FRESH 0xA5 /* what nobody has written yet */
#define FREED 0x5A /* what nobody may read any more */

typedef struct Block {
    struct Block *next;
    void *memory;
    size_t size;
    int device; /* PINNED: page-locked host memory */
} Block;

enum { PINNED = -1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t used[MAX_DEVICES];
static __thread int current = -1;

long long stub_setting(const char *name, long long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atoll(value) : otherwise;
}

int stub_current_device(void) { return current; }

int stub_unsupported(const char *name, int *said) {
    if (!*said) fprintf(stderr, "stub CANN: %s is not implemented\n", name);
    *said = 1;
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

static int num_devices(void) {
    long long number = stub_setting("ACL_STUB_DEVICES", 8);
    return number < MAX_DEVICES ? (int)number : MAX_DEVICES;
}

static size_t memory_of_a_device(void) { return (size_t)stub_setting("ACL_STUB_MEMORY", 4LL << 30); }

/* ---- devices and contexts: the context of a device is its number plus one ---- */

aclError aclInit(const char *config) { return ACL_SUCCESS; }

aclError aclFinalize(void) {
    for (int device = 0; device < num_devices(); device++) stub_drain_device(device);
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)num_devices();
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= num_devices()) return ACL_ERROR_RT_INVALID_DEVICEID;
    current = device;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) {
    stub_drain_device(device);
    return ACL_SUCCESS;
}

aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
    *context = (void *)((intptr_t)device + 1);
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    return aclrtCreateContext(context, current);
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    current = (int)((intptr_t)context - 1);
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    *active = current == device;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return ACL_SUCCESS; }

const char *aclrtGetSocName(void) { return "Ascend910B2"; }

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo kind, int64_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr kind, int64_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}

/* ---- memory ---- */

static aclError take(void **memory, size_t size, int device) {
    Block *block = malloc(sizeof(Block));
    pthread_mutex_lock(&lock);
    int fits = device == PINNED || used[device] + size <= memory_of_a_device();
    if (!block || !fits || posix_memalign(&block->memory, ALIGNMENT, size ? size : 1)) {
        pthread_mutex_unlock(&lock);
        free(block);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    block->size = size;
    block->device = device;
    block->next = blocks;
    blocks = block;
    if (device != PINNED) used[device] += size;
    pthread_mutex_unlock(&lock);
    memset(block->memory, FRESH, size);
    *memory = block->memory;
    return ACL_SUCCESS;
}

static aclError give_back(void *memory) {
    pthread_mutex_lock(&lock);
    Block **at = &blocks;
    while (*at && (*at)->memory != memory) at = &(*at)->next;
    Block *block = *at;
    if (block) {
        *at = block->next;
        if (block->device != PINNED) used[block->device] -= block->size;
    }
    pthread_mutex_unlock(&lock);
    if (!block) return ACL_ERROR_RT_MEMORY_FREE;
    memset(memory, FREED, block->size);
    free(memory);
    free(block);
    return ACL_SUCCESS;
}

int stub_is_pinned(const void *pointer, size_t size) {
    const char *first = pointer;
    int found = 0;
    pthread_mutex_lock(&lock);
    for (Block *block = blocks; block && !found; block = block->next) {
        const char *start = block->memory;
        found = block->device == PINNED && first >= start && first + size <= start + block->size;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static aclError take_on_device(void **memory, size_t size) {
    return current < 0 ? ACL_ERROR_RT_CONTEXT_NULL : take(memory, size, current);
}

aclError aclrtMalloc(void **memory, size_t size, aclrtMemMallocPolicy policy) { return take_on_device(memory, size); }

aclError aclrtMallocAlign32(void **memory, size_t size, aclrtMemMallocPolicy policy) {
    return take_on_device(memory, size);
}

aclError aclrtMallocWithCfg(void **memory, size_t size, aclrtMemMallocPolicy policy, aclrtMallocConfig *config) {
    return take_on_device(memory, size);
}

aclError aclrtMallocHost(void **memory, size_t size) { return take(memory, size, PINNED); }

aclError aclrtMallocHostWithCfg(void **memory, uint64_t size, aclrtMallocConfig *config) {
    return take(memory, size, PINNED);
}

aclError aclrtFree(void *memory) { return give_back(memory); }

aclError aclrtFreeHost(void *memory) { return give_back(memory); }

aclError aclrtGetMemInfo(aclrtMemAttr kind, size_t *available, size_t *total) {
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    pthread_mutex_lock(&lock);
    *total = memory_of_a_device();
    *available = *total - used[current];
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    pthread_mutex_lock(&lock);
    for (Block *block = blocks; block; block = block->next) {
        const char *start = block->memory;
        if ((const char *)pointer < start || (const char *)pointer >= start + block->size) continue;
        int pinned = block->device == PINNED;
        attributes->location.type = pinned ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_DEVICE;
        attributes->location.id = pinned ? 0 : (uint32_t)block->device;
    }
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* ---- versions and settings that torch_npu asks for when it starts ---- */

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char *package, char *version) {
    strcpy(version, "8.5.0");
    return ACL_SUCCESS;
}

aclError aclsysGetVersionNum(char *package, int32_t *version) {
    *version = 80500000;
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt option) { return 64; }

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    memset(value, 0, length);
    strncpy(value, "disable", length - 1); /* no compiling of kernels: those of libopapi.so */
    return ACL_SUCCESS;
}

aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return ACL_SUCCESS; }

const char *aclGetRecentErrMsg(void) { return "(stub CANN keeps no messages)"; }

void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {}

/* ---- settings that change nothing here ---- */

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return ACL_SUCCESS; }

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) { return ACL_SUCCESS; }

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
    *actual = timeout;
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return ACL_SUCCESS; }

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { return ACL_SUCCESS; }

aclError aclrtGetLastError(aclrtLastErrLevel level) { return ACL_SUCCESS; }

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}
