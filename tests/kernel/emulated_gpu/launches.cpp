// How often launches of csrc/gpu ask the driver: once a device for its facts, once a kernel for its code and its
// memory. And which kernels may begin before the one ahead has ended.
#include <cstdio>
#include <thread>
#include <vector>

#include "gpu/device/launch.h"

void block_barrier() {}

namespace {

using namespace radix;

void one(int) {}
void other(int) {}

void launch(void (*kernel)(int), int device, int shared_bytes) {
  gpu::LaunchShape shape;
  shape.shared_bytes = shared_bytes;
  gpu::launch_dependent("op", rk_device{RK_DEVICE_CUDA, device}, 0, kernel, shape, 1);
}

void expect(const char* what, int found, int expected) {
  if (found == expected) return;
  std::fprintf(stderr, "%s: %d, expected %d\n", what, found, expected);
  std::exit(1);
}

void expect_questions(const char* what, int asked, int told) {
  expect(what, attributes_asked, asked);
  expect(what, attributes_told, told);
}

}  // namespace

int main() {
  constexpr int kLittle = 1 << 10, kMuch = 64 << 10, kMore = 128 << 10;
  for (int i = 0; i < 3; i++) launch(one, 0, kLittle);
  expect_questions("little memory", 1, 0);
  for (int i = 0; i < 3; i++) launch(one, 0, kMuch);
  expect_questions("much memory", 1, 1);
  launch(one, 0, kMore);
  launch(one, 0, kMuch);
  expect_questions("more, then less", 1, 2);
  launch(other, 0, kMuch);
  launch(one, 1, kMuch);
  expect_questions("another kernel, another device", 3, 4);
  expect("multiprocessors", gpu::multiprocessors(rk_device{RK_DEVICE_CUDA, 1}), 9);
  gpu::multiprocessors(rk_device{RK_DEVICE_CUDA, 1});
  expect_questions("another attribute", 4, 4);
  // A device that is not remembered is not taken for another one.
  for (int i = 0; i < 2; i++) gpu::multiprocessors(rk_device{RK_DEVICE_CUDA, 64});
  expect_questions("device 64", 6, 4);

  attributes_told = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++)
    threads.emplace_back([] {
      for (int n = 0; n < 1000; n++) launch(n % 2 ? one : other, n % 3, kMuch);
    });
  for (std::thread& thread : threads) thread.join();
  expect("four threads, two kernels, three devices", attributes_told, 4 * 2 * 3);
  expect("once a kernel, device and thread", attributes_asked, 6 + 4 * 2 * 3);

  // Not where the code is the PTX of an older chip, which cannot wait.
  for (const int version : {80, 89, 90, 100}) {
    compiled_for = version;
    early_launches = 0;
    launch(one, version, kLittle);  // a device of its own
    launch(one, version, kLittle);
    expect("begins early", early_launches, version >= 90 ? 2 : 0);
  }
  std::puts("ok");
}
