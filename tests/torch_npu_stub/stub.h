/* Shared by the stub libraries: queues of work, and what an unfinished part answers. */
#pragma once

#include <stddef.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

/* Run `work(argument)` on the stream's thread after all that was queued before it. `argument` is freed afterwards. */
void stub_enqueue(aclrtStream stream, void (*work)(void *), void *argument);

/* Return once everything queued on the streams of a device has run. */
void stub_drain_device(int device);

/* The thread's current device, or -1. */
int stub_current_device(void);

/* Whether [pointer, pointer + size) is page-locked host memory. */
int stub_is_pinned(const void *pointer, size_t size);

/* What every function answers that nobody wrote: an error, and its name the first time, so that nothing seems to work
 * that does not. */
int stub_unsupported(const char *name, int *said);

/* The number in an environment variable, or a default. */
long long stub_setting(const char *name, long long otherwise);
