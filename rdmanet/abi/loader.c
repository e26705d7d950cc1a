/* Opening a verbs library; loader.h has the contract. */
#include "loader.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct symbol {
    const char *name;
    size_t offset; /* of the pointer in struct rn_library */
    bool required;
};

#define RN_REQUIRED(name) {#name, offsetof(struct rn_library, name), true},
#define RN_OPTIONAL(name) {#name, offsetof(struct rn_library, name), false},

static const struct symbol verbs_symbols[] = {
    RN_VERBS_REQUIRED(RN_REQUIRED) RN_VERBS_OPTIONAL(RN_OPTIONAL)};
static const struct symbol cm_symbols[] = {RN_CM_REQUIRED(RN_REQUIRED) RN_CM_OPTIONAL(RN_OPTIONAL)};

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static const char *why(void)
{
    const char *text = dlerror();

    return text ? text : "unknown reason";
}

/*
 * RTLD_LOCAL: the embedded device exports the names of libibverbs, and a real
 * libibverbs in the same process must neither see them nor be seen.
 */
static int open_object(const char *path, void **handle, char *err, size_t errlen)
{
    *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (*handle)
        return 0;
    snprintf(err, errlen, "%s", why());
    return -ENOENT;
}

static int fill(struct rn_library *lib, void *handle, const struct symbol *symbols, size_t count,
                const char *path, char *err, size_t errlen)
{
    for (size_t i = 0; i < count; i++) {
        void *address = dlsym(handle, symbols[i].name);

        if (!address && symbols[i].required) {
            snprintf(err, errlen, "%s has no %s", path, symbols[i].name);
            return -ENOSYS;
        }
        memcpy((char *)lib + symbols[i].offset, &address, sizeof(address));
    }
    return 0;
}

int rn_library_open(const char *verbs_path, const char *cm_path, struct rn_library **out, char *err,
                    size_t errlen)
{
    struct rn_library *lib = calloc(1, sizeof(*lib));
    int rc;

    *out = NULL;
    if (!lib) {
        snprintf(err, errlen, "out of memory");
        return -ENOMEM;
    }
    rc = open_object(verbs_path, &lib->verbs_handle, err, errlen);
    if (rc == 0)
        rc = fill(lib, lib->verbs_handle, verbs_symbols, COUNT(verbs_symbols), verbs_path, err, errlen);
    if (rc == 0 && cm_path)
        rc = open_object(cm_path, &lib->cm_handle, err, errlen);
    if (rc == 0 && cm_path)
        rc = fill(lib, lib->cm_handle, cm_symbols, COUNT(cm_symbols), cm_path, err, errlen);
    if (rc < 0) {
        rn_library_close(lib);
        return rc;
    }
    *out = lib;
    return 0;
}

void rn_library_close(struct rn_library *lib)
{
    if (!lib)
        return;
    if (lib->cm_handle)
        dlclose(lib->cm_handle);
    if (lib->verbs_handle)
        dlclose(lib->verbs_handle);
    free(lib);
}

static const char *optional(const struct rn_library *lib, const struct symbol *symbols, size_t count, size_t *index,
                            int *present)
{
    for (size_t i = 0; i < count; i++) {
        if (symbols[i].required || (*index)--)
            continue;
        *present = *(void *const *)((const char *)lib + symbols[i].offset) != NULL;
        return symbols[i].name;
    }
    return NULL;
}

const char *rn_library_optional(const struct rn_library *lib, size_t index, int *present)
{
    const char *name = optional(lib, verbs_symbols, COUNT(verbs_symbols), &index, present);

    return name ? name : optional(lib, cm_symbols, COUNT(cm_symbols), &index, present);
}

void *rn_library_symbol(const struct rn_library *lib, const char *name)
{
    return dlsym(lib->verbs_handle, name);
}

pid_t rn_pid;

static void forked(void)
{
    rn_pid = getpid();
}

__attribute__((constructor)) static void watch_forks(void)
{
    rn_pid = getpid();
    pthread_atfork(NULL, NULL, forked);
}
