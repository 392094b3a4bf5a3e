/* Streams, events and copies. Each stream has a thread that does its work in order and, like a device, on its own time.
 *
 * Streams and events are never freed, because what is queued may still hold one; a few bytes each.
 *
 * ACL_STUB_COPY_DELAY_US  how long a queued copy or kernel waits before it begins (0): who reads too early reads old bytes
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stub.h"

typedef struct Task {
    struct Task *next;
    void (*work)(void *);
    void *argument;
} Task;

typedef struct Stream {
    struct Stream *next;
    int device;
    int32_t id;
    int started;
    Task *first, **end;
    unsigned long long queued, done; /* tasks, ever */
} Stream;

typedef struct {
    unsigned long long recorded, reached; /* times, ever */
    struct timespec when;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* something was queued, or is done */
static Stream *streams;
static int32_t num_streams;

static void *run_stream(void *argument) {
    Stream *stream = argument;
    aclrtSetDevice(stream->device);
    pthread_mutex_lock(&lock);
    while (1) {
        while (!stream->first) pthread_cond_wait(&changed, &lock);
        Task *task = stream->first;
        pthread_mutex_unlock(&lock);
        task->work(task->argument);
        free(task->argument);
        pthread_mutex_lock(&lock);
        stream->first = task->next;
        if (!stream->first) stream->end = &stream->first;
        stream->done++;
        free(task);
        pthread_cond_broadcast(&changed);
    }
    return NULL; /* never: the thread ends with the process */
}

static Stream *new_stream(int device) {
    Stream *stream = calloc(1, sizeof(Stream));
    stream->device = device;
    stream->end = &stream->first;
    stream->id = num_streams++;
    stream->next = streams;
    streams = stream;
    return stream;
}

/* A null stream is the default stream of the current device. Called with the lock held. */
static Stream *known(aclrtStream given) {
    static Stream *defaults[64];
    if (given) return given;
    int device = stub_current_device() < 0 ? 0 : stub_current_device();
    if (!defaults[device]) defaults[device] = new_stream(device);
    return defaults[device];
}

void stub_enqueue(aclrtStream given, void (*work)(void *), void *argument) {
    Task *task = calloc(1, sizeof(Task));
    task->work = work;
    task->argument = argument;
    pthread_mutex_lock(&lock);
    Stream *stream = known(given);
    if (!stream->started) { /* only now: a process that forks before it uses a device has no threads */
        pthread_t thread;
        pthread_create(&thread, NULL, run_stream, stream);
        pthread_detach(thread);
        stream->started = 1;
    }
    *stream->end = task;
    stream->end = &task->next;
    stream->queued++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void drain(Stream *stream) {
    for (unsigned long long all = stream->queued; stream->done < all;) pthread_cond_wait(&changed, &lock);
}

void stub_drain_device(int device) {
    pthread_mutex_lock(&lock);
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device) drain(stream);
    pthread_mutex_unlock(&lock);
}

/* ---- streams ---- */

aclError aclrtCreateStream(aclrtStream *stream) {
    if (stub_current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    pthread_mutex_lock(&lock);
    *stream = new_stream(stub_current_device());
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flags) {
    return aclrtCreateStream(stream);
}

aclError aclrtDestroyStream(aclrtStream stream) {
    aclrtSynchronizeStream(stream);
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    pthread_mutex_lock(&lock);
    *id = known(stream)->id;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream given, aclrtStreamStatus *status) {
    pthread_mutex_lock(&lock);
    Stream *stream = known(given);
    *status = stream->done == stream->queued ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    pthread_mutex_lock(&lock);
    drain(known(stream));
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    return aclrtSynchronizeStream(stream);
}

aclError aclrtSynchronizeDevice(void) {
    if (stub_current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    stub_drain_device(stub_current_device());
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return aclrtSynchronizeDevice(); }

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) { return ACL_SUCCESS; }

aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType kind, uint32_t *value) {
    *value = 1;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    *model = NULL;
    return ACL_SUCCESS;
}

/* ---- events: each recording is a turn, and who waits, waits for the last turn at that time ---- */

typedef struct {
    Event *event;
    unsigned long long turn;
} Turn;

static Turn *turn_of(Event *event, unsigned long long turn) {
    Turn *made = malloc(sizeof(Turn));
    *made = (Turn){event, turn};
    return made;
}

static void reach(void *argument) {
    Turn *turn = argument;
    pthread_mutex_lock(&lock);
    turn->event->reached = turn->turn;
    clock_gettime(CLOCK_MONOTONIC, &turn->event->when);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void wait_for(Event *event, unsigned long long turn) {
    pthread_mutex_lock(&lock);
    while (event->reached < turn) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void wait_in_stream(void *argument) {
    Turn *turn = argument;
    wait_for(turn->event, turn->turn);
}

static unsigned long long recorded(Event *event, int more) {
    pthread_mutex_lock(&lock);
    unsigned long long turn = event->recorded += more;
    pthread_mutex_unlock(&lock);
    return turn;
}

aclError aclrtCreateEvent(aclrtEvent *event) {
    *event = calloc(1, sizeof(Event));
    return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) { return aclrtCreateEvent(event); }

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) { return aclrtCreateEvent(event); }

aclError aclrtDestroyEvent(aclrtEvent event) { return ACL_SUCCESS; }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    stub_enqueue(stream, reach, turn_of(event, recorded(event, 1)));
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { return ACL_SUCCESS; } /* turns make it needless */

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    stub_enqueue(stream, wait_in_stream, turn_of(event, recorded(event, 0)));
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t timeout) {
    return aclrtStreamWaitEvent(stream, event);
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    wait_for(event, recorded(event, 0));
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) { return aclrtSynchronizeEvent(event); }

static int is_reached(Event *event) {
    pthread_mutex_lock(&lock);
    int reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&lock);
    return reached;
}

aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus *status) {
    *status = is_reached(event) ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = is_reached(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = is_reached(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end) {
    struct timespec from = ((Event *)start)->when, to = ((Event *)end)->when;
    *ms = (float)((double)(to.tv_sec - from.tv_sec) * 1e3 + (double)(to.tv_nsec - from.tv_nsec) / 1e6);
    return ACL_SUCCESS;
}

/* ---- copies ---- */

typedef struct {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
} Copy;

static void copy_rows(const Copy *copy) {
    for (size_t row = 0; row < copy->height; row++)
        memmove(copy->to + row * copy->to_pitch, copy->from + row * copy->from_pitch, copy->width);
}

static void copy_late(void *argument) {
    long long delay = stub_setting("ACL_STUB_COPY_DELAY_US", 0);
    if (delay > 0) usleep((useconds_t)delay);
    copy_rows(argument);
}

/* The host waits for copies from and to its pageable memory; page-locked memory is copied late. */
static aclError queue_copy(Copy copy, aclrtMemcpyKind kind, aclrtStream stream) {
    const void *host = NULL;
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE) host = copy.from;
    if (kind == ACL_MEMCPY_DEVICE_TO_HOST) host = copy.to;
    size_t pitch = host == copy.from ? copy.from_pitch : copy.to_pitch;
    size_t extent = copy.height ? (copy.height - 1) * pitch + copy.width : 0;
    Copy *queued = malloc(sizeof(Copy));
    *queued = copy;
    stub_enqueue(stream, copy_late, queued);
    return host && !stub_is_pinned(host, extent) ? aclrtSynchronizeStream(stream) : ACL_SUCCESS;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    memmove(to, from, size);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(
    void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    return queue_copy((Copy){to, from, size, size, size, 1}, kind, stream);
}

aclError aclrtMemcpyAsyncWithCondition(
    void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, size, kind, stream);
}

aclError aclrtMemcpy2d(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, aclrtMemcpyKind kind) {
    copy_rows(&(Copy){to, from, to_pitch, from_pitch, width, height});
    return ACL_SUCCESS;
}

aclError aclrtMemcpy2dAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, aclrtMemcpyKind kind,
    aclrtStream stream) {
    return queue_copy((Copy){to, from, to_pitch, from_pitch, width, height}, kind, stream);
}

typedef struct {
    void *memory;
    int value;
    size_t size;
} Fill;

static void fill_late(void *argument) {
    Fill *fill = argument;
    memset(fill->memory, fill->value, fill->size);
}

aclError aclrtMemset(void *memory, size_t room, int32_t value, size_t size) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    memset(memory, value, size);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t size, aclrtStream stream) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    Fill *fill = malloc(sizeof(Fill));
    *fill = (Fill){memory, value, size};
    stub_enqueue(stream, fill_late, fill);
    return ACL_SUCCESS;
}
