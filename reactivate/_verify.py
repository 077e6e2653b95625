def verify(): pass
class Verdict: pass
