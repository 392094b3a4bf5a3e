/* The few kernels that moving tensors takes, done on the host: copying through strides, joining, filling.
 *
 * torch_npu looks here (libopapi.so) for aclnn<Kernel>GetWorkspaceSize, which takes the arguments, and aclnn<Kernel>,
 * which queues the work. A kernel that is not here it does not find, and its older way of computing answers with an error.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "stub.h"

#define MAX_DIMS 16

typedef struct {
    char *data; /* of the first element */
    int64_t num_dims, shape[MAX_DIMS], strides[MAX_DIMS];
    aclDataType type;
} aclTensor;

typedef struct {
    uint64_t size;
    const aclTensor *tensors[];
} aclTensorList;

/* Copy one strided region onto another of the same shape. */
typedef struct {
    aclTensor to, from;
} Job;

typedef struct aclOpExecutor {
    int64_t num_jobs;
    Job jobs[];
} aclOpExecutor;

static size_t bytes_of(aclDataType type) {
    switch (type) {
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: case ACL_HIFLOAT8: case ACL_FLOAT8_E5M2: case ACL_FLOAT8_E4M3FN:
            return 1;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16:
            return 2;
        case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: case ACL_COMPLEX32:
            return 4;
        case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: case ACL_COMPLEX64:
            return 8;
        case ACL_COMPLEX128:
            return 16;
        default:
            return 0;
    }
}

/* ---- descriptions of arguments ---- */

aclTensor *aclCreateTensor(
    const int64_t *shape, uint64_t num_dims, aclDataType type, const int64_t *strides, int64_t offset, aclFormat format,
    const int64_t *storage_shape, uint64_t storage_dims, void *storage) {
    if (num_dims > MAX_DIMS) return NULL;
    aclTensor *tensor = calloc(1, sizeof(aclTensor));
    tensor->type = type;
    tensor->num_dims = (int64_t)num_dims;
    tensor->data = (char *)storage + offset * (int64_t)bytes_of(type);
    memcpy(tensor->shape, shape, num_dims * sizeof(int64_t));
    memcpy(tensor->strides, strides, num_dims * sizeof(int64_t));
    return tensor;
}

int aclDestroyTensor(const aclTensor *tensor) {
    free((void *)tensor);
    return ACL_SUCCESS;
}

aclTensorList *aclCreateTensorList(const aclTensor *const *tensors, uint64_t size) {
    aclTensorList *list = malloc(sizeof(aclTensorList) + size * sizeof *tensors);
    list->size = size;
    memcpy(list->tensors, tensors, size * sizeof *tensors);
    return list;
}

int aclDestroyTensorList(const aclTensorList *list) {
    for (uint64_t at = 0; at < list->size; at++) aclDestroyTensor(list->tensors[at]);
    free((void *)list);
    return ACL_SUCCESS;
}

/* ---- copying ---- */

static void copy_elements(const Job *job, int64_t dim, char *to, const char *from) {
    size_t size = bytes_of(job->to.type);
    if (dim == job->to.num_dims) {
        memmove(to, from, size);
        return;
    }
    int is_row = dim == job->to.num_dims - 1 && job->to.strides[dim] == 1 && job->from.strides[dim] == 1;
    if (is_row) {
        memmove(to, from, (size_t)job->to.shape[dim] * size);
        return;
    }
    for (int64_t at = 0; at < job->to.shape[dim]; at++) {
        int64_t there = at * job->to.strides[dim] * (int64_t)size, here = at * job->from.strides[dim] * (int64_t)size;
        copy_elements(job, dim + 1, to + there, from + here);
    }
}

static void run_jobs(void *argument) {
    long long delay = stub_setting("ACL_STUB_COPY_DELAY_US", 0);
    if (delay > 0) usleep((useconds_t)delay);
    const aclOpExecutor *executor = argument;
    for (int64_t at = 0; at < executor->num_jobs; at++) {
        const Job *job = &executor->jobs[at];
        copy_elements(job, 0, job->to.data, job->from.data);
    }
}

static aclOpExecutor *executor_of(int64_t num_jobs) {
    aclOpExecutor *executor = calloc(1, sizeof(aclOpExecutor) + (size_t)num_jobs * sizeof(Job));
    executor->num_jobs = num_jobs;
    return executor;
}

static int refuse(const char *kernel, const char *why) {
    fprintf(stderr, "stub CANN: %s %s\n", kernel, why);
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

/* Fill in a job that copies `from` to `to`, stretching the sides of `from` that have length 1. */
static int set_job(Job *job, const char *kernel, const aclTensor *to, const aclTensor *from) {
    if (to->type != from->type || !bytes_of(to->type)) return refuse(kernel, "converts no data types");
    *job = (Job){*to, *to};
    job->from.data = from->data;
    int64_t missing = to->num_dims - from->num_dims;
    for (int64_t dim = 0; dim < to->num_dims; dim++) {
        int64_t side = dim < missing ? 1 : from->shape[dim - missing];
        if (side != 1 && side != to->shape[dim]) return refuse(kernel, "was given shapes that do not fit");
        job->from.strides[dim] = side == 1 ? 0 : from->strides[dim - missing];
    }
    return ACL_SUCCESS;
}

static int queue(aclOpExecutor *executor, aclrtStream stream) {
    stub_enqueue(stream, run_jobs, executor);
    return ACL_SUCCESS;
}

/* ---- the kernels ---- */

int aclnnInplaceCopyGetWorkspaceSize(
    aclTensor *to, const aclTensor *from, uint64_t *workspace, aclOpExecutor **executor) {
    *workspace = 0;
    *executor = executor_of(1);
    return set_job(&(*executor)->jobs[0], "aclnnInplaceCopy", to, from);
}

int aclnnInplaceCopy(void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    return queue(executor, stream);
}

int aclnnCatGetWorkspaceSize(
    const aclTensorList *list, int64_t dim, aclTensor *out, uint64_t *workspace, aclOpExecutor **executor) {
    *workspace = 0;
    *executor = executor_of((int64_t)list->size);
    if (dim < 0) dim += out->num_dims;
    aclTensor region = *out;
    for (uint64_t at = 0; at < list->size; at++) {
        const aclTensor *from = list->tensors[at];
        if (from->num_dims != out->num_dims) return refuse("aclnnCat", "was given shapes that do not fit");
        region.shape[dim] = from->shape[dim];
        int status = set_job(&(*executor)->jobs[at], "aclnnCat", &region, from);
        if (status) return status;
        region.data += from->shape[dim] * out->strides[dim] * (int64_t)bytes_of(out->type);
    }
    return ACL_SUCCESS;
}

int aclnnCat(void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    return queue(executor, stream);
}

static const char zeros[16];

int aclnnInplaceZeroGetWorkspaceSize(aclTensor *to, uint64_t *workspace, aclOpExecutor **executor) {
    aclTensor zero = {.data = (char *)zeros, .type = to->type};
    *workspace = 0;
    *executor = executor_of(1);
    return set_job(&(*executor)->jobs[0], "aclnnInplaceZero", to, &zero);
}

int aclnnInplaceZero(void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    return queue(executor, stream);
}
