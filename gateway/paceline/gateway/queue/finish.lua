-- id, tokens served, lease_ms
local id, served, lease_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
-- First a write that needs no memory: after it the server refuses none of this script's, even when it is full.
redis.call('ZREMRANGEBYSCORE', ENDED, '-inf', now)
local request = load(id)
local found = 0
if request then
  found = 1
  if request.state == 'reserved' then
    redis.call('ZREM', RESERVED, id)
  elseif request.state == 'queued' then
    take_waiting(id, request)
  else
    redis.call('HDEL', LEASES, id)
  end
  redis.call('DEL', key('req', id))
  if request.state ~= 'reserved' and served ~= tonumber(request.charged) then
    charge(request.class, request.tenant, served - tonumber(request.charged))
  end
end
redis.call('ZADD', ENDED, now + 2 * lease_ms, id)
redis.call('PEXPIRE', ENDED, int(2 * lease_ms + 60000))
return found
