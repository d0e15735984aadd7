/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An embedding program whose interpreter ends while native threads make calls. Usage: ending SETUP
 *
 * SETUP is Python code that leaves a backend in `gpu`; one with an attribute `slow` is only asked to synchronize.
 */
#include <gpu_runtime.h>

#include <pthread.h>
#include <time.h>

enum { THREADS = 8 };

typedef struct {
    pthread_t thread;
    int64_t backend;
    gpurt_code last;
    long calls;
    int slow;
} worker_t;

#define EXPECT(condition)                                                                          \
    do                                                                                             \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, gpurt_last_error()); \
            return 1;                                                                              \
        }                                                                                          \
    while (0)

static void *work(void *given)
{
    worker_t *worker = (worker_t *)given;
    uint64_t ptr;
    do {
        worker->last = worker->slow ? gpurt_synchronize(worker->backend, 0)
                                    : gpurt_alloc(worker->backend, 64, "ending", &ptr);
        if (worker->last == GPURT_OK && !worker->slow)
            worker->last = gpurt_free(worker->backend, ptr);
        __atomic_add_fetch(&worker->calls, 1, __ATOMIC_SEQ_CST);
    } while (worker->last == GPURT_OK);
    return 0;
}

static int before_import(void)
{
    int32_t kind;
    EXPECT(gpurt_import() == GPURT_ERROR_SHUTDOWN);
    EXPECT(strstr(gpurt_last_error(), "there is no Python interpreter") != 0);
    EXPECT(gpurt_backend_kind(1, &kind) == GPURT_ERROR_NOT_IMPORTED);
    EXPECT(!gpurt_alive());
    return 0;
}

/* What every call says when the interpreter is gone; arithmetic still works. */
static int after_end(int64_t backend, uint64_t ptr)
{
    gpurt_logits logits = {4096, 256, 3, 60, GPURT_FLOAT32, 0};
    uint64_t number = 0;
    int32_t live = 5;
    char bytes[16];
    EXPECT(!gpurt_alive());
    EXPECT(gpurt_import() == GPURT_ERROR_SHUTDOWN);
    EXPECT(gpurt_alloc(backend, 64, 0, &number) == GPURT_ERROR_SHUTDOWN && number == 0);
    EXPECT(strstr(gpurt_last_error(), "has ended") != 0 && gpurt_last_code() == GPURT_ERROR_SHUTDOWN);
    EXPECT(gpurt_free(backend, ptr) == GPURT_ERROR_SHUTDOWN);
    EXPECT(gpurt_copy_d2h(backend, ptr, bytes, sizeof bytes) == GPURT_ERROR_SHUTDOWN);
    EXPECT(gpurt_find_block(backend, ptr, &live, 0) == GPURT_ERROR_SHUTDOWN && live == 5);
    EXPECT(gpurt_synchronize(backend, 0) == GPURT_ERROR_SHUTDOWN);
    EXPECT(gpurt_backend_release(backend) == GPURT_ERROR_SHUTDOWN);
    EXPECT(gpurt_logits_row(&logits, 2, &number) == GPURT_OK && number == 4096 + 512);
    return 0;
}

static void *after_end_on_a_thread(void *given)
{
    worker_t *worker = (worker_t *)given;
    worker->last = after_end(worker->backend, 4096);
    return 0;
}

static void nap(long milliseconds)
{
    struct timespec time = {0, milliseconds * 1000000};
    nanosleep(&time, 0);
}

int main(int argc, char **argv)
{
    worker_t workers[THREADS] = {0};
    PyObject *module, *gpu;
    PyThreadState *state;
    int64_t backend = 0;
    uint64_t ptr = 0;
    long busy = 0;
    int i;
    EXPECT(argc == 2);
    if (before_import())
        return 1;
    Py_InitializeEx(0);
    EXPECT(PyRun_SimpleString(argv[1]) == 0);
    if (gpurt_import() != GPURT_OK) {
        printf("import: %d %s\n", (int)gpurt_last_code(), gpurt_last_error());
        return Py_FinalizeEx();
    }
    module = PyImport_ImportModule("__main__");
    EXPECT(module != 0);
    gpu = PyObject_GetAttrString(module, "gpu");
    EXPECT(gpu != 0 && gpurt_backend_from_object(gpu, &backend) == GPURT_OK);
    EXPECT(gpurt_alloc(backend, 64, "kept", &ptr) == GPURT_OK);
    for (i = 0; i < THREADS; ++i) {
        workers[i].backend = backend;
        workers[i].slow = PyObject_HasAttrString(gpu, "slow");
        EXPECT(pthread_create(&workers[i].thread, 0, work, &workers[i]) == 0);
    }
    Py_DECREF(gpu);
    Py_DECREF(module);
    state = PyEval_SaveThread();
    nap(150);
    PyEval_RestoreThread(state);
    EXPECT(Py_FinalizeEx() == 0);
    for (i = 0; i < THREADS; ++i) {
        pthread_join(workers[i].thread, 0);
        EXPECT(workers[i].last == GPURT_ERROR_SHUTDOWN);
        busy += workers[i].calls > 1;
    }
    EXPECT(busy > 0);
    if (after_end(backend, ptr))
        return 1;
    EXPECT(pthread_create(&workers[0].thread, 0, after_end_on_a_thread, &workers[0]) == 0);
    pthread_join(workers[0].thread, 0);
    EXPECT(workers[0].last == 0);
    printf("ended well\n");
    return 0;
}
