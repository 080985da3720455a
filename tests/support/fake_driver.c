/* A libcuda that writes down what it is asked for, one line a call; see fake_driver.py. */
#include <stdio.h>
#include <string.h>

static char calls[1 << 16];
static int failures[8], failure_count;
static int modules, functions, shown = 2;
static char names[256][64];
static _Thread_local void* current;

#define NOTE(...) (snprintf(calls + strlen(calls), sizeof(calls) - strlen(calls), __VA_ARGS__), 0)

const char* fake_calls(void) { return calls; }
void fake_forget(void) {
  calls[0] = 0;
  failure_count = 0;
}
/* The next loads fail with these statuses, the last one given first. */
void fake_fail_load(int status) { failures[failure_count++] = status; }
/* How many arguments of a launch are written down. */
void fake_show(int arguments) { shown = arguments; }

int cuInit(unsigned flags) { return flags; }
int cuGetErrorName(int status, const char** text) {
  *text = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : status == 222 ? "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" : 0;
  return *text ? 0 : 1;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return NOTE("context %ld\n", (long)context);
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(100L + device);
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  if (failure_count > 0) {
    NOTE("load fails\n");
    return failures[--failure_count];
  }
  *module = (void*)(long)++modules;
  return NOTE("load %s\n", (const char*)image);
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (module == 0) return 400;
  strcpy(names[functions], name);
  *function = names[functions++];
  return NOTE("function %s\n", name);
}
int cuLaunchKernel(const char* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  if (gx == 0) return 1;
  NOTE("launch %s %u,%u,%u %u,%u,%u shared %u stream %ld arguments ", function, gx, gy, gz, bx, by, bz, shared,
       (long)stream);
  for (int i = 0; i < shown; ++i) NOTE("%lld ", *(long long*)arguments[i]);
  return NOTE("%s\n", extra ? "extra" : "");
}
