/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The calls of the function table. All of them: any thread; the GIL may be held and need not be; each takes it by itself
 * and returns with it as it found it. "Waits" says that a call waits for the device, with the GIL given up. A call that
 * only enqueues work returns at once. Sizes are bytes, addresses are of the device unless they are pointers of C.
 * What a backend refuses and when it raises is said in gpu_runtime/backend.py, under the same names.
 *
 * A `stream` is a number: GPURT_STREAM_DEFAULT (the backend's own), GPURT_STREAM_LEGACY, GPURT_STREAM_PER_THREAD, a
 * handle of gpurt_create_stream, or a cudaStream_t. gpurt_stream_from_object (objects.h) makes one of a Python object.
 */
#ifndef GPU_RUNTIME_CALLS_H
#define GPU_RUNTIME_CALLS_H

#include "import.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPURT_CALL_(name, parameters, ...)          \
    static inline gpurt_code gpurt_##name parameters \
    {                                                \
        gpurt_call_ call;                            \
        gpurt_code code = gpurt_enter_(&call);       \
        if (code != GPURT_OK)                        \
            return code;                             \
        call.table->name(__VA_ARGS__, &call.status); \
        return gpurt_leave_(&call);                  \
    }

/* Backends */

/* A handle of a GpuBackend, or of an object whose attribute `gpu` is one, such as a model of metrale. The handle keeps
 * the backend until gpurt_backend_release; every call gives a new one. After the backend's close(), its calls fail with
 * GPURT_ERROR_DEVICE. The caller keeps `object` alive during the call. */
GPURT_CALL_(backend_from_object, (PyObject * object, int64_t *backend), object, backend)
/* Give a handle up: it means nothing from here on. The backend's memory is not freed by it. Does not wait. */
GPURT_CALL_(backend_release, (int64_t backend), backend)
/* GPURT_KIND_HOST, whose device addresses are addresses of this process, or GPURT_KIND_CUDA. */
GPURT_CALL_(backend_kind, (int64_t backend, int32_t *kind), backend, kind)

/* Memory */

/* A block of at least 1 byte, aligned to 256, with unspecified content. `tag` (UTF-8, or NULL) names it in reports.
 * GPURT_ERROR_OUT_OF_MEMORY leaves the backend usable. May wait: for work that uses blocks freed before. */
GPURT_CALL_(alloc, (int64_t backend, uint64_t nbytes, const char *tag, uint64_t *ptr), backend, nbytes, tag, ptr)
/* As gpurt_alloc; the host may read and write the block by its address, while no work uses it. */
GPURT_CALL_(alloc_managed, (int64_t backend, uint64_t nbytes, const char *tag, uint64_t *ptr), backend, nbytes, tag,
            ptr)
/* Free a block by its first address; 0 does nothing. Work already enqueued may still use it. Any other address, that of
 * a block freed before included, is GPURT_ERROR_INVALID_POINTER. Waits on the host backend only. */
GPURT_CALL_(free, (int64_t backend, uint64_t ptr), backend, ptr)
/* Page-locked host memory, all zero, that copies reach at full speed. */
GPURT_CALL_(alloc_host_pinned, (int64_t backend, uint64_t nbytes, void **host), backend, nbytes, host)
/* Free it, by its first address; work already enqueued may still use it. NULL does nothing. */
GPURT_CALL_(free_host_pinned, (int64_t backend, void *host), backend, host)
/* Whether an address lies in a live block (page-locked memory included), and in which. `block` may be NULL; it is not
 * written when `live` becomes 0. On CUDA, memory that this backend did not allocate is not live for it. Never waits. */
GPURT_CALL_(find_block, (int64_t backend, uint64_t address, int32_t *live, gpurt_block *block), backend, address, live,
            block)
/* Say that code of your own wrote these bytes of device memory: a checking host backend would call a later read of them
 * uninitialised. Costs nothing on CUDA. */
GPURT_CALL_(mark_written, (int64_t backend, uint64_t ptr, uint64_t nbytes), backend, ptr, nbytes)

/* Copies and fills. The first three, and gpurt_memset, come after all work on the backend's default stream, wait, and
 * are done when they return. Those "on stream" come after the work on that stream, and wait as well. */

GPURT_CALL_(copy_h2d, (int64_t backend, const void *src, uint64_t dst, uint64_t nbytes), backend, src, dst, nbytes)
GPURT_CALL_(copy_d2h, (int64_t backend, uint64_t src, void *dst, uint64_t nbytes), backend, src, dst, nbytes)
GPURT_CALL_(copy_d2d, (int64_t backend, uint64_t src, uint64_t dst, uint64_t nbytes), backend, src, dst, nbytes)
GPURT_CALL_(copy_h2d_on_stream, (int64_t backend, const void *src, uint64_t dst, uint64_t nbytes, uint64_t stream),
            backend, src, dst, nbytes, stream)
GPURT_CALL_(copy_d2h_on_stream, (int64_t backend, uint64_t src, void *dst, uint64_t nbytes, uint64_t stream), backend,
            src, dst, nbytes, stream)
/* The async copies enqueue. The host memory stays the caller's: it must stay valid, and as it is, until the stream has
 * passed the copy. (From Python the backend keeps it alive; of a plain address it cannot.) */
GPURT_CALL_(copy_h2d_async, (int64_t backend, const void *src, uint64_t dst, uint64_t nbytes, uint64_t stream), backend,
            src, dst, nbytes, stream)
GPURT_CALL_(copy_d2h_async, (int64_t backend, uint64_t src, void *dst, uint64_t nbytes, uint64_t stream), backend, src,
            dst, nbytes, stream)
GPURT_CALL_(copy_d2d_async, (int64_t backend, uint64_t src, uint64_t dst, uint64_t nbytes, uint64_t stream), backend,
            src, dst, nbytes, stream)
/* Set every byte of a span to `value`, 0 to 255. */
GPURT_CALL_(memset, (int64_t backend, uint64_t ptr, int32_t value, uint64_t nbytes), backend, ptr, value, nbytes)
GPURT_CALL_(memset_async, (int64_t backend, uint64_t ptr, int32_t value, uint64_t nbytes, uint64_t stream), backend,
            ptr, value, nbytes, stream)

/* Streams and events */

/* The handle of the backend's own stream, which GPURT_STREAM_DEFAULT stands for. On CUDA, a cudaStream_t. */
GPURT_CALL_(default_stream, (int64_t backend, uint64_t *stream), backend, stream)
/* A new non-blocking stream; on CUDA, a cudaStream_t. */
GPURT_CALL_(create_stream, (int64_t backend, uint64_t *stream), backend, stream)
/* Destroy a stream of gpurt_create_stream. Waits: its work is finished first. */
GPURT_CALL_(destroy_stream, (int64_t backend, uint64_t stream), backend, stream)
/* Waits for everything on a stream; reports what went wrong on it. */
GPURT_CALL_(synchronize, (int64_t backend, uint64_t stream), backend, stream)
/* A new event; only one made with `timing` (not 0) has a time. */
GPURT_CALL_(create_event, (int64_t backend, int32_t timing, uint64_t *event), backend, timing, event)
GPURT_CALL_(destroy_event, (int64_t backend, uint64_t event), backend, event)
/* Let an event stand for everything enqueued on `stream` so far. */
GPURT_CALL_(record_event, (int64_t backend, uint64_t event, uint64_t stream), backend, event, stream)
/* Let later work on `stream` come after what the event stands for: the device waits, the caller does not. */
GPURT_CALL_(stream_wait_event, (int64_t backend, uint64_t stream, uint64_t event), backend, stream, event)
/* Whether what the event stands for is done; an event that was never recorded is. Does not wait. */
GPURT_CALL_(event_query, (int64_t backend, uint64_t event, int32_t *done), backend, event, done)
/* Waits for what the event stands for. */
GPURT_CALL_(event_synchronize, (int64_t backend, uint64_t event), backend, event)
/* Milliseconds between two timing events that have been reached. Does not wait. */
GPURT_CALL_(event_elapsed_ms, (int64_t backend, uint64_t start, uint64_t end, double *ms), backend, start, end, ms)

/* Logits */

/* The rows of a LogitsArena, or of an object whose method `__logits_arena__` returns one, such as a model of metrale.
 * They are the object's: valid as long as it is open. The caller keeps `object` alive during the call. */
GPURT_CALL_(logits_from_object, (PyObject * object, gpurt_logits *logits), object, logits)

/* The address of a row: arithmetic, without Python and without a call. GPURT_ERROR_INVALID_POINTER when there is no
 * such row. */
static inline gpurt_code gpurt_logits_row(const gpurt_logits *logits, int64_t index, uint64_t *address)
{
    char text[120];
    if (!logits || !address)
        return gpurt_fail(GPURT_ERROR_VALUE, "gpurt_logits_row: expected rows and room for an address, got NULL");
    if (index < 0 || index >= logits->rows) {
        snprintf(text, sizeof text, "logits row: expected an index in [0, %lld), got %lld", (long long)logits->rows,
                 (long long)index);
        return gpurt_fail(GPURT_ERROR_INVALID_POINTER, text);
    }
    *address = logits->base + (uint64_t)index * logits->row_bytes;
    return GPURT_OK;
}

/* The index of the row at an address; the reverse of gpurt_logits_row. */
static inline gpurt_code gpurt_logits_index(const gpurt_logits *logits, uint64_t address, int64_t *index)
{
    char text[160];
    uint64_t offset, row;
    if (!logits || !index)
        return gpurt_fail(GPURT_ERROR_VALUE, "gpurt_logits_index: expected rows and room for an index, got NULL");
    offset = address - logits->base;
    row = logits->row_bytes ? offset / logits->row_bytes : 0;
    if (address < logits->base || !logits->row_bytes || offset % logits->row_bytes || row >= (uint64_t)logits->rows) {
        snprintf(text, sizeof text, "logits: expected the address of one of %lld rows of %llu bytes from 0x%llx, got 0x%llx",
                 (long long)logits->rows, (unsigned long long)logits->row_bytes, (unsigned long long)logits->base,
                 (unsigned long long)address);
        return gpurt_fail(GPURT_ERROR_INVALID_POINTER, text);
    }
    *index = (int64_t)row;
    return GPURT_OK;
}

#ifdef __cplusplus
}
#endif

#endif
