"""The counter generator with Python's integers."""

MASK = (1 << 64) - 1


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def top_bits(seed, position, purpose, sub):
    """The 24 bits of one draw; negative 32-bit numbers are reinterpreted as unsigned."""
    position, purpose, sub = position & 0xFFFFFFFF, purpose & 0xFFFFFFFF, sub & 0xFFFFFFFF
    k1 = mix(seed ^ ((position * 0xD1B54A32D192ED03) & MASK))
    k2 = mix(k1 ^ (purpose << 21) ^ ((sub * 0x2545F4914F6CDD1D) & MASK))
    return k2 >> 40
