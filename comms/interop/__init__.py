"""What other systems load of holdfast: each module imports one of them, which is not a dependency of ours."""
