/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a host and a running gpu_runtime agree on: version, codes, structs, and the function table.
 *
 * The major version changes when something here changes its meaning or its place; the minor version, when entries are
 * added at the table's end. A host works with any table of its own major version and of its minor version or a later one.
 */
#ifndef GPU_RUNTIME_ABI_H
#define GPU_RUNTIME_ABI_H

#include <stdint.h>

#define GPURT_ABI_MAJOR 1
#define GPURT_ABI_MINOR 0
#define GPURT_CAPSULE "gpu_runtime._C_API"

/* What a function returns. Negative codes are the host's and the table's own; the others stand for an exception. */
typedef int32_t gpurt_code;
enum {
    GPURT_OK = 0,
    GPURT_ERROR_RUNTIME = 1,              /* any other exception */
    GPURT_ERROR_VALUE = 2,                /* ValueError */
    GPURT_ERROR_TYPE = 3,                 /* TypeError */
    GPURT_ERROR_BUFFER = 4,               /* BufferError */
    GPURT_ERROR_MEMORY = 5,               /* MemoryError: of the host */
    GPURT_ERROR_LOOKUP = 6,               /* LookupError */
    GPURT_ERROR_IMPORT = 7,               /* ImportError */
    GPURT_ERROR_INTERRUPTED = 8,          /* KeyboardInterrupt: the call may or may not have had its effect */
    GPURT_ERROR_GPU_RUNTIME = 20,         /* gpu_runtime.errors.GpuRuntimeError, and so on */
    GPURT_ERROR_BACKEND_UNAVAILABLE = 21, /* BackendUnavailable */
    GPURT_ERROR_DEVICE = 22,              /* DeviceError; a backend that is closed, too */
    GPURT_ERROR_INVALID_POINTER = 23,     /* InvalidPointer */
    GPURT_ERROR_OUT_OF_MEMORY = 24,       /* OutOfMemory: of the device; the backend works on */
    GPURT_ERROR_UNINITIALIZED_READ = 25,  /* UninitializedRead */
    GPURT_ERROR_UNWRITTEN_OUTPUT = 26,    /* UnwrittenOutput */
    GPURT_ERROR_GUARD_VIOLATION = 27,     /* GuardViolation */
    GPURT_ERROR_UNKNOWN_KERNEL = 28,      /* UnknownKernel */
    GPURT_ERROR_SHUTDOWN = -1,            /* there is no interpreter, or it has begun to end */
    GPURT_ERROR_NOT_IMPORTED = -2,        /* gpurt_import() did not succeed before */
    GPURT_ERROR_ABI = -3,                 /* this header and the running gpu_runtime have different ABI versions */
    GPURT_ERROR_HANDLE = -4               /* no such backend handle: released, or never given */
};

enum { GPURT_KIND_HOST = 1, GPURT_KIND_CUDA = 2 };

enum { GPURT_FLOAT32 = 0, GPURT_FLOAT16 = 1, GPURT_BFLOAT16 = 2 };

/* Streams as plain numbers; any other value is a cudaStream_t. */
enum { GPURT_STREAM_DEFAULT = 0, GPURT_STREAM_LEGACY = 1, GPURT_STREAM_PER_THREAD = 2 };

#define GPURT_STATUS_BYTES 1024

/* What a table entry says of a call: code, and on failure a message, UTF-8, cut to what fits. */
typedef struct gpurt_status {
    gpurt_code code;
    char message[GPURT_STATUS_BYTES - 4];
} gpurt_status;

/* A live block. */
typedef struct gpurt_block {
    uint64_t base;   /* its first address */
    uint64_t nbytes; /* its extent */
    uint64_t offset; /* where in it the address lies that was asked for */
} gpurt_block;

/* Rows of logits: element j of row i lies at base + i * row_bytes + j * (size of dtype). */
typedef struct gpurt_logits {
    uint64_t base;
    uint64_t row_bytes; /* from one row to the next, padding included */
    int64_t rows;
    int64_t columns; /* logits in a row; what follows them is padding */
    int32_t dtype;   /* GPURT_FLOAT32 ... */
    int32_t reserved;
} gpurt_logits;

/*
 * The function table. Use it through the functions of calls.h, which count the call, look at `alive`, hold the GIL and
 * keep the caller's Python exception. Whoever calls an entry directly does these four things; then `alive` and
 * `inflight` are accessed atomically, `inflight` is raised before `alive` is read, and `status->code` is set to
 * GPURT_ERROR_INTERRUPTED beforehand: an entry that did not get to its end leaves it there.
 *
 * The memory of the table is never freed, nor are its entries.
 */
typedef struct gpurt_table {
    int32_t abi_major;
    int32_t abi_minor;
    uint64_t struct_size;
    int32_t alive;    /* 1 until the interpreter begins to end */
    int32_t inflight; /* calls that are under way; the interpreter's end waits for them */

    /* backends */
    void (*backend_from_object)(void *object, int64_t *backend, gpurt_status *status);
    void (*backend_release)(int64_t backend, gpurt_status *status);
    void (*backend_kind)(int64_t backend, int32_t *kind, gpurt_status *status);

    /* memory */
    void (*alloc)(int64_t backend, uint64_t nbytes, const char *tag, uint64_t *ptr, gpurt_status *status);
    void (*alloc_managed)(int64_t backend, uint64_t nbytes, const char *tag, uint64_t *ptr, gpurt_status *status);
    void (*free)(int64_t backend, uint64_t ptr, gpurt_status *status);
    void (*alloc_host_pinned)(int64_t backend, uint64_t nbytes, void **host, gpurt_status *status);
    void (*free_host_pinned)(int64_t backend, void *host, gpurt_status *status);
    void (*find_block)(int64_t backend, uint64_t address, int32_t *live, gpurt_block *block, gpurt_status *status);
    void (*mark_written)(int64_t backend, uint64_t ptr, uint64_t nbytes, gpurt_status *status);

    /* copies and fills */
    void (*copy_h2d)(int64_t backend, const void *src, uint64_t dst, uint64_t nbytes, gpurt_status *status);
    void (*copy_d2h)(int64_t backend, uint64_t src, void *dst, uint64_t nbytes, gpurt_status *status);
    void (*copy_d2d)(int64_t backend, uint64_t src, uint64_t dst, uint64_t nbytes, gpurt_status *status);
    void (*copy_h2d_on_stream)(int64_t backend, const void *src, uint64_t dst, uint64_t nbytes, uint64_t stream,
                               gpurt_status *status);
    void (*copy_d2h_on_stream)(int64_t backend, uint64_t src, void *dst, uint64_t nbytes, uint64_t stream,
                               gpurt_status *status);
    void (*copy_h2d_async)(int64_t backend, const void *src, uint64_t dst, uint64_t nbytes, uint64_t stream,
                           gpurt_status *status);
    void (*copy_d2h_async)(int64_t backend, uint64_t src, void *dst, uint64_t nbytes, uint64_t stream,
                           gpurt_status *status);
    void (*copy_d2d_async)(int64_t backend, uint64_t src, uint64_t dst, uint64_t nbytes, uint64_t stream,
                           gpurt_status *status);
    void (*memset)(int64_t backend, uint64_t ptr, int32_t value, uint64_t nbytes, gpurt_status *status);
    void (*memset_async)(int64_t backend, uint64_t ptr, int32_t value, uint64_t nbytes, uint64_t stream,
                         gpurt_status *status);

    /* streams and events */
    void (*default_stream)(int64_t backend, uint64_t *stream, gpurt_status *status);
    void (*create_stream)(int64_t backend, uint64_t *stream, gpurt_status *status);
    void (*destroy_stream)(int64_t backend, uint64_t stream, gpurt_status *status);
    void (*synchronize)(int64_t backend, uint64_t stream, gpurt_status *status);
    void (*create_event)(int64_t backend, int32_t timing, uint64_t *event, gpurt_status *status);
    void (*destroy_event)(int64_t backend, uint64_t event, gpurt_status *status);
    void (*record_event)(int64_t backend, uint64_t event, uint64_t stream, gpurt_status *status);
    void (*stream_wait_event)(int64_t backend, uint64_t stream, uint64_t event, gpurt_status *status);
    void (*event_query)(int64_t backend, uint64_t event, int32_t *done, gpurt_status *status);
    void (*event_synchronize)(int64_t backend, uint64_t event, gpurt_status *status);
    void (*event_elapsed_ms)(int64_t backend, uint64_t start, uint64_t end, double *ms, gpurt_status *status);

    /* logits */
    void (*logits_from_object)(void *object, gpurt_logits *logits, gpurt_status *status);
} gpurt_table;

#endif
