#include "rans.cuh"
