"""The loss scale as a plain class."""


class LossScale:
    def __init__(self, scale, window, hysteresis, consecutive, minimum):
        self.scale, self.window, self.minimum = scale, window, minimum
        self.limit = self.hysteresis = hysteresis
        self.consecutive = consecutive
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow):
        if overflow:
            if self.limit == 1 or self.hysteresis == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.hysteresis = self.limit
            num_clean = self.iteration - self.last_overflow - 1
            if num_clean > 0 and num_clean % self.window == 0:
                if not self.consecutive:
                    self.hysteresis = self.limit
                self.scale *= 2
        self.iteration += 1

    def fields(self):
        return self.scale, self.iteration, self.last_overflow, self.hysteresis
