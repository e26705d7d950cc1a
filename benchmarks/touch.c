/* Programs work on bytes: `fill` writes one byte of every cache line, `look` reads one, `touch` does both. */

#include <stddef.h>

void touch(unsigned char *bytes, size_t length)
{
	for (size_t i = 0; i < length; i += 64)
		bytes[i]++;
}

void fill(volatile unsigned char *bytes, size_t length, unsigned char value)
{
	for (size_t i = 0; i < length; i += 64)
		bytes[i] = value;
}

unsigned look(const volatile unsigned char *bytes, size_t length)
{
	unsigned sum = 0;
	for (size_t i = 0; i < length; i += 64)
		sum += bytes[i];
	return sum;
}
