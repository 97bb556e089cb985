/* Counts every byte that malloc has given out: LD_PRELOAD this, ask heap_now, heap_peak and heap_reset. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long now, peak;

static void *counted(void *block) {
    if (!block) return block;
    long size = (long)malloc_usable_size(block), level = atomic_fetch_add(&now, size) + size;
    long most = atomic_load(&peak);
    while (level > most && !atomic_compare_exchange_weak(&peak, &most, level)) {}
    return block;
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *memalign(size_t align, size_t size) { return counted(__libc_memalign(align, size)); }
void *aligned_alloc(size_t align, size_t size) { return counted(__libc_memalign(align, size)); }

void *realloc(void *block, size_t size) {
    long before = block ? (long)malloc_usable_size(block) : 0;
    void *moved = __libc_realloc(block, size);
    if (moved || !size) atomic_fetch_sub(&now, before); /* else the block stays as it was */
    return counted(moved);
}

int posix_memalign(void **out, size_t align, size_t size) {
    void *block = counted(__libc_memalign(align, size));
    if (block) *out = block;
    return block ? 0 : ENOMEM;
}

void free(void *block) {
    if (block) atomic_fetch_sub(&now, (long)malloc_usable_size(block));
    __libc_free(block);
}

long heap_now(void) { return now; }
long heap_peak(void) { return peak; }
void heap_reset(void) { atomic_store(&peak, atomic_load(&now)); }
