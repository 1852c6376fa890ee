// CUDA for g++: a kernel is a function that is called once for every thread, with threadIdx and blockIdx set before.
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>

#include <vector_types.h>
// CUDA's header of these functions includes its whole runtime; half floats need one of them.
#define __VECTOR_FUNCTIONS_H__
inline float2 make_float2(float x, float y) { return {x, y}; }

using std::memcpy;
static thread_local uint3 threadIdx, blockIdx;
static thread_local dim3 blockDim, gridDim;

template <class F> void each(const dim3& size, uint3& at, F run) {
    for (at.z = 0; at.z < size.z; ++at.z)
        for (at.y = 0; at.y < size.y; ++at.y)
            for (at.x = 0; at.x < size.x; ++at.x) run();
}

template <class... P, std::size_t... I>
void run_all(void (*kernel)(P...), const dim3& grid, const dim3& block, unsigned first, void** args,
             std::index_sequence<I...>) {
    gridDim = grid;
    blockDim = block;
    each(dim3(grid.x - first, grid.y, grid.z), blockIdx, [&] {
        blockIdx.x += first;
        each(block, threadIdx, [&] { kernel(*static_cast<std::remove_cv_t<P>*>(args[I])...); });
        blockIdx.x -= first;
    });
}

// Bytes of each parameter, negative for a pointer: what the caller has must be the same.
template <class... P> int describe(void (*)(P...), int* bytes) {
    ((*bytes++ = std::is_pointer_v<P> ? -int(sizeof(P)) : int(sizeof(P))), ...);
    return sizeof...(P);
}

// size: of the grid, of a block, and the first block along x to run.
template <class... P> void run_all(void (*kernel)(P...), const unsigned* size, void** args) {
    const dim3 grid(size[0], size[1], size[2]), block(size[3], size[4], size[5]);
    run_all(kernel, grid, block, size[6], args, std::index_sequence_for<P...>{});
}

#define HOST_KERNEL(name)                                                        \
    extern "C" int describe_##name(int* bytes) { return describe(name, bytes); } \
    extern "C" void launch_##name(const unsigned* size, void** args) { run_all(name, size, args); }
