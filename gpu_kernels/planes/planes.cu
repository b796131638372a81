#include "planes.cuh"
