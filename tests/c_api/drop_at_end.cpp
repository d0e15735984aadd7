/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A native thread that gives up a gpurt::ref while the interpreter ends: drop_at_end PYTHON. Exits with 0. */
#include <gpu_runtime.h>

#include <thread>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    PyConfig_SetBytesString(&config, &config.program_name, argv[1]);
    Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    /* Runs after the end of the table, and holds the GIL: the reference goes meanwhile. */
    PyRun_SimpleString("import atexit, ctypes\natexit.register(ctypes.PyDLL(None).usleep, 300000)");
    gpurt::check(gpurt_import());
    auto *held = new gpurt::ref(gpurt::ref::steal(PyList_New(0)));
    std::thread([held] {
        while (gpurt_alive())
            usleep(1000);
        usleep(100000);
        delete held;
    }).detach();
    PyThreadState *state = PyEval_SaveThread();
    usleep(50000);
    PyEval_RestoreThread(state);
    const int code = Py_FinalizeEx();
    usleep(200000);
    return code;
}
