-- id, verifier to avoid
local id, avoid = ARGV[2], ARGV[3]
redis.call('HDEL', LEASES, id) -- needs no memory, so that none of the writes after it is refused
local request = load(id)
if not request or request.state == 'reserved' then
  return 0
end
if request.state == 'queued' then
  redis.call('HSET', key('req', id), 'avoid', avoid)
  return 1
end
request.retry = '1'
request.deadline = now + tonumber(request.wait_ms)
-- The epoch moves on at once: an extend that is still on its way has lost the lease.
redis.call('HSET', key('req', id), 'state', 'queued', 'retry', '1', 'avoid', avoid, 'verifier', '',
  'deadline', request.deadline, 'epoch', int(tonumber(request.epoch) + 1))
put_waiting(id, request)
return 1
