-- ARGV: now, id, owner, sequences, expiry ms, max requests. Returns {status, depth}.
local id, owner, sequences = ARGV[2], ARGV[3], tonumber(ARGV[4])
redis.call('ZREMRANGEBYSCORE', key('reserved'), '-inf', now)
if redis.call('EXISTS', key('req', id)) == 1 then return {'exists', 0} end
local depth = redis.call('ZCARD', key('waiting')) + redis.call('ZCARD', key('reserved'))
if depth >= tonumber(ARGV[6]) then return {'full', depth} end
local expiry = tonumber(ARGV[5])
redis.call('HSET', key('req', id), 'state', 'reserved', 'owner', owner, 'sequences', sequences, 'epoch', 0)
redis.call('PEXPIRE', key('req', id), expiry)
redis.call('ZADD', key('reserved'), now + expiry, id)
return {'ok', depth}
