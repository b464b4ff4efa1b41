/* Memory of clients, mapped: what its owner takes away reads as zeros from then on.

   Such a read is answered with SIGBUS, which ends a process. The handler here puts private zeros in the place of
   the mapping, from that page to its end, notes that it has, and returns to the read. What it is not for goes on
   as if it were not there. (Wayland's servers treat the memory of their clients so, in libwayland's wl_shm.) */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 1024, FREE = 0 };

/* A place is taken and given back under Python's lock; the handler reads it at any time, on any thread. */
static struct {
    _Atomic uintptr_t start; /* FREE: there is none */
    _Atomic size_t nbytes;   /* whole pages */
    atomic_int gone;
} mappings[MOST];

static uintptr_t page;
static int installed;
static struct sigaction before;

static int zeros_at(uintptr_t at) {
    for (size_t i = 0; i < MOST; i++) {
        uintptr_t start = atomic_load(&mappings[i].start);
        size_t nbytes = atomic_load(&mappings[i].nbytes);
        if (start == FREE || at < start || at - start >= nbytes) continue;
        /* A place that was given to another meanwhile: the size is that one's, and not what this thread reads. */
        if (atomic_load(&mappings[i].start) != start) continue;
        uintptr_t from = at & ~(page - 1);
        /* Read-only, so that it does not count as memory where no more of that may be promised. */
        void *zeros = mmap((void *)from, start + nbytes - from, PROT_READ,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (zeros == MAP_FAILED) return 0;
        atomic_store(&mappings[i].gone, 1);
        return 1;
    }
    return 0;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)context;
    int kept = errno;
    if (info->si_code == BUS_ADRERR && zeros_at((uintptr_t)info->si_addr)) {
        errno = kept;
        return;
    }
    /* The access is made again, and fails as it would have; a signal that somebody sent has to be sent again. */
    sigaction(number, &before, NULL);
    if (info->si_code != BUS_ADRERR) raise(number);
    errno = kept;
}

static int install(void) {
    if (installed) return 1;
    page = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    return installed = sigaction(SIGBUS, &ours, &before) == 0;
}

/* Map the first `nbytes` of a file -> its number, or -1 (with errno); `*start` is where it is. */
int gemmwire_map(int file, size_t nbytes, void **start) {
    if (!install()) return -1;
    size_t whole = (nbytes + page - 1) & ~(size_t)(page - 1);
    for (int i = 0; i < MOST; i++) {
        if (atomic_load(&mappings[i].start) != FREE) continue;
        void *at = mmap(NULL, whole, PROT_READ, MAP_SHARED, file, 0);
        if (at == MAP_FAILED) return -1;
        atomic_store(&mappings[i].gone, 0);
        atomic_store(&mappings[i].nbytes, whole);
        atomic_store(&mappings[i].start, (uintptr_t)at);
        *start = at;
        return i;
    }
    errno = EMFILE;
    return -1;
}

int gemmwire_is_gone(int number) { return atomic_load(&mappings[number].gone); }

void gemmwire_unmap(int number) {
    void *start = (void *)atomic_load(&mappings[number].start);
    size_t nbytes = atomic_load(&mappings[number].nbytes);
    atomic_store(&mappings[number].start, FREE);
    munmap(start, nbytes);
}
